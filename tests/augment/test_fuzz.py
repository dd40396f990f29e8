"""Mixes at random over dtype x layout x encoding x compile, against rules written out once more in plain Python."""

import math
import os
import random

import pytest
import torch

from gpu_logicmix import GPULogicMix, Mixup, MixupPME, MultiLabelMixup, OrMixup

pytestmark = pytest.mark.slow
NAN = float("nan")
START = 0 if os.environ.get("CI") else random.SystemRandom().randrange(2**32)
KINDS = {"logicmix": GPULogicMix, "mixup": Mixup, "or": OrMixup, "multi": MultiLabelMixup, "pme": MixupPME}
IMAGES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.uint8: 0.5001}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]


def label(kind, group, share, absent_if_unknown):
    """One label of one sample. `group` holds 1, 0, None for unknown and "odd" for a value that is none of them."""
    if kind == "pme":
        if group[0] not in (0, 1):
            return None
        return sum(w * (y if y in (0, 1) else 0.5) for w, y in zip(share, group, strict=True))
    if kind in ("mixup", "or", "multi") or absent_if_unknown:
        group = [0 if y is None else y for y in group]
    if kind == "mixup":
        return None if "odd" in group else sum(w * y for w, y in zip(share, group, strict=True))
    if 1 in group:
        return 1
    return 0 if all(y == 0 for y in group) else None


def meaning(value, unknown):
    if value != value or value == unknown:
        return None
    return value if value in (0, 1) else "odd"


def laid_out(tensor, layout):
    """The same numbers, differently in memory."""
    if layout == "last" and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor.contiguous()


def drawn(kind, rng):
    dtype = rng.choice(FLOATS + WHOLE)
    # Only what the type can hold: others are refused (test_mix_labels.py). -1 is taken for all.
    held = {torch.bool: [-1], torch.uint8: [-1, -1, 2, 255]}.get(dtype, [-1, -1, 2, -7])
    unknown = rng.choice([*held, NAN] if dtype in FLOATS else held)
    values = [0, 1]
    if dtype in FLOATS:
        values += [unknown, NAN, 0.5, 3]
    elif dtype is not torch.bool:
        values += [3] if dtype is torch.uint8 and unknown == -1 else [unknown, 3]
    options = {}
    if kind == "logicmix":
        k_min = rng.randint(1, 4)
        options = {"p": rng.choice([0.0, 0.5, 1.0]), "k_min": k_min, "k_max": rng.randint(k_min, 5)}
        options["partners"] = rng.choice(["distinct", "with-replacement"])
        options["unknown_as"] = rng.choice(["unknown", "absent"])
    return {
        "kind": kind,
        "options": options,
        "unknown": unknown,
        "values": values,
        "dtype": dtype,
        "images": rng.choice(list(IMAGES)),
        "shape": rng.choice([(3, 4, 5), (1, 1, 1), (3, 5), (2, 2, 3, 2), (3, 7, 9)]),
        "batch": rng.randint(1, 9),
        "categories": rng.choice([0, 1, 3, 8, 9, 16]),
        "layouts": rng.choices(["plain", "last", "transposed", "strided"], k=2),
        "seed": rng.randrange(10_000),
    }


def check(case, compiled=False):
    torch.manual_seed(case["seed"])
    images = torch.rand(case["batch"], *case["shape"], dtype=torch.float64)
    images = (images * 256).to(torch.uint8) if case["images"] is torch.uint8 else images.to(case["images"])
    drawn = torch.randint(len(case["values"]), (case["batch"], case["categories"]))
    targets = torch.tensor(case["values"], dtype=torch.float64)[drawn].to(case["dtype"])
    images, targets = (laid_out(t, layout) for t, layout in zip((images, targets), case["layouts"], strict=True))
    before = images.clone(), targets.clone()
    mix = KINDS[case["kind"]](unknown=case["unknown"], **case["options"])
    plan = mix.plan(case["batch"])
    function = mix
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(mix, fullgraph=True, backend="eager")
    mixed, labels = function(images, targets, plan)

    assert mixed.shape == images.shape
    assert mixed.dtype == images.dtype
    soft = case["kind"] in ("mixup", "pme") and not targets.is_floating_point()
    assert labels.dtype == (torch.float32 if soft else targets.dtype)
    # The unknown value as the dtype holds it: -1 is 255 in a byte.
    unknown = case["unknown"]
    if not soft and case["dtype"] in WHOLE:
        unknown = torch.tensor(unknown).to(labels.dtype).item()
    meant = [[meaning(v, case["unknown"]) for v in row] for row in targets.tolist()]
    found = labels.tolist()
    for i in range(case["batch"]):
        members = plan.index[i, : plan.size[i]].tolist()
        share = [1 / len(members)] * len(members) if plan.weight is None else plan.weight[i].tolist()[: len(members)]
        expected = sum(w * before[0][m].double() for w, m in zip(share, members, strict=True))
        assert (mixed[i].double() - expected).abs().max() <= IMAGES[case["images"]]
        absent = case["options"].get("unknown_as") == "absent" and len(members) > 1
        for c in range(case["categories"]):
            want = label(case["kind"], [meant[m][c] for m in members], share, absent)
            got = found[i][c]
            if want is None:
                assert got == unknown or (math.isnan(unknown) and math.isnan(got))
            else:
                assert abs(got - want) <= (2e-2 if labels.dtype in (torch.float16, torch.bfloat16) else 1e-6)
    for now, was in zip((images, targets), before, strict=True):  # nothing was written to
        assert ((now == was) | (now != now)).all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_two_thousand_mixes(kind):
    several(kind, 400)


@pytest.mark.parametrize("kind", list(KINDS))
def test_compiled_mixes(kind):
    """Few of them: each is compiled anew, since its options and its dtypes are others."""
    several(kind, 2, compiled=True)


def several(kind, count, compiled=False):
    rng = random.Random(f"{START} {kind}")
    for number in range(count):
        case = drawn(kind, rng)
        try:
            check(case, compiled)
        except Exception as error:
            raise AssertionError(f"case {number} from {START}: {case}") from error
