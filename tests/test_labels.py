"""labels.py: every rule once more, slowly and obviously, and compared."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcpl.augs.logic_mix import logic_mix_target

from gpu_logicmix import convert_labels, hide_labels, label_counts, logic_or
from gpu_logicmix.labels import is_unknown, to_bits

NAN = float("nan")


def or_oracle(group):
    """One line a rule. `group` holds 1, 0 and None for unknown."""
    if any(label == 1 for label in group):
        return 1
    if all(label == 0 for label in group):
        return 0
    return None


def encode(label, unknown):
    return unknown if label is None else label


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize(
    ("dtype", "unknown"),
    [
        (torch.int8, -1),
        (torch.int64, -1),
        (torch.float32, -1),
        (torch.float16, NAN),
        (torch.uint8, 255),
        (torch.float64, 9),
    ],
)
def test_or_of_every_combination(k, dtype, unknown, device):
    groups = list(itertools.product([1, 0, None], repeat=k))
    targets = torch.tensor(
        [[encode(label, unknown) for label in group] for group in groups], dtype=dtype, device=device
    )
    result = logic_or(targets.T[None], dim=1, unknown=unknown)[0]
    assert result.dtype == dtype
    for group, value in zip(groups, result.tolist(), strict=True):
        assert same(value, encode(or_oracle(group), unknown)), group


@pytest.mark.parametrize("k", range(1, 7))
def test_or_agrees_with_mlcpl(k):
    targets = torch.tensor(list(itertools.product([1.0, 0.0, NAN], repeat=k))).T.contiguous()
    ours = logic_or(targets, dim=0, unknown=NAN)
    assert torch.equal(ours, logic_mix_target(targets)) or torch.allclose(
        ours, logic_mix_target(targets), equal_nan=True
    )
    with_minus_one = logic_or(targets.nan_to_num(nan=-1), dim=0)
    assert torch.equal(with_minus_one, logic_mix_target(targets).nan_to_num(nan=-1))


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_or_over_any_dimension(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    values = data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=math.prod(shape), max_size=math.prod(shape)))
    targets = torch.tensor(values).reshape(shape)
    result = logic_or(targets, dim=dim).flatten().tolist()
    groups = targets.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
    assert result == [encode(or_oracle([None if v == -1 else v for v in group]), -1) for group in groups]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_or_of_labels_that_cannot_be_unknown(dtype):
    targets = torch.tensor([[[0, 0, 1], [0, 1, 1]]], dtype=dtype)
    assert torch.equal(logic_or(targets), torch.tensor([[0, 1, 1]], dtype=dtype))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_encodings(kind):
    logic = np.array([[1, 0, -1], [-1, 1, 0]], dtype=np.int8)
    nan = np.array([[1, 0, NAN], [NAN, 1, 0]], dtype=np.float32)
    hcp = np.array([[1, -1, 0], [0, 1, -1]], dtype=np.int8)
    coded = {"logic": logic, "nan": nan, "hcp": hcp}
    for (source, a), (target, b) in itertools.product(coded.items(), coded.items()):
        result = convert_labels(torch.from_numpy(a) if kind == "torch" else a, source, target)
        assert isinstance(result, torch.Tensor if kind == "torch" else np.ndarray)
        np.testing.assert_array_equal(np.asarray(result), b, err_msg=f"{source} -> {target}")
        assert np.asarray(result).dtype == b.dtype


def test_encodings_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match=r"targets\[0, 1\] is 2"):
        convert_labels(np.array([[1, 2]]), "logic", "nan")
    with pytest.raises(ValueError, match="source='mlcpl': the label encodings are logic, nan, hcp"):
        convert_labels(np.array([[1]]), "mlcpl", "nan")


@pytest.fixture
def full():
    return (np.random.default_rng(5).random((2000, 20)) < 0.2).astype(np.uint8)


def test_hide_uniform(full):
    hidden = hide_labels(full, 0.3, seed=1)
    assert hidden.dtype == np.int8
    known = hidden != -1
    assert (hidden[known] == full[known]).all()
    assert abs(known.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / full.size)
    assert (hidden == hide_labels(full, 0.3, seed=1)).all()
    assert (hidden != hide_labels(full, 0.3, seed=2)).any()
    assert (hide_labels(full, 1.0, seed=1) == full).all()
    assert (hide_labels(full, 0.0, seed=1) == -1).all()


def test_hide_hcp_is_the_numpy_recipe_bit_for_bit(full):
    np.random.seed(0)
    recipe = np.where(np.random.random(full.shape) < 0.1, full.astype(np.int8), -1)
    state = np.random.get_state()
    for seed in (0, 7):
        np.testing.assert_array_equal(hide_labels(full, 0.1, seed=seed, protocol="hcp"), recipe)
    assert all(np.array_equal(a, b) for a, b in zip(state, np.random.get_state(), strict=True)), (
        "global state was touched"
    )


def test_hide_per_class(full):
    full[:, 3] = 0
    full[:5, 3] = 1  # a class with fewer positives than asked for
    hidden = hide_labels(full, 8, seed=0, protocol="per-class")
    counts = label_counts(hidden, dim=0)
    assert counts.positive.tolist() == [8, 8, 8, 5] + [8] * 16
    assert counts.negative.tolist() == [8] * 20
    assert (hidden[hidden != -1] == full[hidden != -1]).all()
    counts = label_counts(hide_labels(full, (2, 50), seed=0, protocol="per-class"), dim=0)
    assert set(counts.positive.tolist()) == {2}
    assert set(counts.negative.tolist()) == {50}


def test_hide_all_but_one_positive(full):
    hidden = hide_labels(full, None, seed=0, protocol="single-positive")
    assert (hidden[hidden != -1] == 1).all()
    assert (label_counts(hidden, dim=1).positive == np.minimum(full.sum(1), 1)).all()
    assert (full[hidden == 1] == 1).all()
    # The positive that stays is drawn, not the first one.
    chosen = np.array(
        [hide_labels(np.ones((1, 4), np.int8), seed=s, protocol="single-positive")[0] for s in range(400)]
    )
    assert ((chosen == 1).sum(0) > 60).all()


@pytest.mark.parametrize("protocol", ["uniform", "hcp", "per-class", "single-positive"])
def test_hide_is_the_same_for_numpy_and_torch(full, protocol, device):
    known = 3 if protocol == "per-class" else 0.4
    expected = hide_labels(full, known, seed=3, protocol=protocol)
    result = hide_labels(torch.from_numpy(full).to(device), known, seed=3, protocol=protocol)
    assert result.dtype == torch.int8
    assert result.device.type == device.type
    np.testing.assert_array_equal(result.cpu().numpy(), expected)
    assert hide_labels(torch.from_numpy(full).float(), known, 3, protocol).dtype == torch.float32


def test_hide_leaves_unknown_labels_unknown_and_the_input_alone(full):
    once = hide_labels(full, 0.5, seed=0)
    before = once.copy()
    twice = hide_labels(once, 0.5, seed=1)
    assert (once == before).all()
    assert (twice[once == -1] == -1).all()
    assert abs((twice != -1).mean() - 0.25) < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"known": 1.5}, "known=1.5"),
        ({"known": -0.1}, "known=-0.1"),
        ({"known": None}, "known=None"),
        ({"known": 0.5, "protocol": "per-class"}, "known=0.5"),
        ({"known": 0.5, "protocol": "random"}, "protocol='random': the protocols are uniform, hcp, per-class"),
    ],
)
def test_hide_refuses(full, arguments, message):
    with pytest.raises(ValueError, match=message):
        hide_labels(full, **arguments)


def test_hide_names_the_bad_label():
    with pytest.raises(ValueError, match=r"targets\[1, 0\] is 3"):
        hide_labels(np.array([[0, 1], [3, 0]]), 0.5, 0)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        hide_labels(np.zeros(4), 0.5, 0)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.lists(st.sampled_from([1, 0, -1]), min_size=3, max_size=3), min_size=1, max_size=6))
def test_label_counts(rows):
    targets = torch.tensor(rows)
    for counts, nested in (
        (label_counts(targets, dim=1), rows),
        (label_counts(np.array(rows), dim=1), rows),
        (label_counts(targets.T, dim=0), rows),
        (label_counts(targets.float().masked_fill(targets < 0, NAN), dim=1, unknown=NAN), rows),
    ):
        assert counts.positive.tolist() == [row.count(1) for row in nested]
        assert counts.negative.tolist() == [row.count(0) for row in nested]
        assert counts.unknown.tolist() == [row.count(-1) for row in nested]
    assert int(label_counts(targets).unknown) == sum(row.count(-1) for row in rows)


def test_coco_at_30_percent(shared):
    """The paper, section 2.3: 0.88 positive and 23.1 negative labels a sample."""
    with np.load(shared / "data" / "coco2014_labels.npz") as coco:
        labels = coco["labels"][coco["split"] == "train"]
    hidden = hide_labels(labels, 0.3, seed=0)
    counts = label_counts(hidden)
    assert counts.positive / len(labels) == pytest.approx(0.88, abs=0.01)
    assert counts.negative / len(labels) == pytest.approx(23.1, abs=0.1)
    for proportion in (0.1, 0.5, 0.9):
        for protocol in ("uniform", "hcp"):
            known = (hide_labels(labels, proportion, 0, protocol) != -1).mean()
            assert known == pytest.approx(proportion, abs=0.001)


# ------------------------------------------------------------------------------------------------ NaN and other values
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_nan_is_unknown_whatever_unknown_says(kind):
    targets = np.array([[NAN, 1, 0], [NAN, NAN, 0], [-1, 0, 1]], dtype=np.float32)
    labels = kind(targets)
    assert np.asarray(is_unknown(labels)).tolist() == [[True, False, False], [True, True, False], [True, False, False]]
    assert np.asarray(is_unknown(labels, 9.0)).sum() == 3
    assert np.asarray(is_unknown(labels, NAN)).sum() == 3
    assert [np.asarray(n).tolist() for n in label_counts(labels, 0)] == [[0, 1, 1], [0, 1, 2], [3, 1, 0]]
    np.testing.assert_array_equal(np.asarray(logic_or(labels, dim=0)), [-1, 1, 1])
    np.testing.assert_array_equal(
        np.asarray(convert_labels(labels, "logic", "hcp")), [[0, 1, -1], [0, 0, -1], [0, -1, 1]]
    )
    hidden = np.asarray(hide_labels(labels, 1.0))
    np.testing.assert_array_equal(hidden, [[-1, 1, 0], [-1, -1, 0], [-1, 0, 1]])
    assert (np.asarray(hide_labels(labels, 3, protocol="per-class")) == hidden).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int8])
@pytest.mark.parametrize("unknown", [-1, NAN, 7])
def test_or_never_takes_another_value_as_absent(dtype, unknown):
    if unknown != unknown and dtype(0).dtype.kind == "i":
        return
    odd = 0.9 if dtype(0).dtype.kind == "f" else 2
    targets = np.array([[odd, odd, 0, 1], [0, 1, 0, 0]], dtype=dtype)
    for labels in (targets, torch.from_numpy(targets)):
        result = np.asarray(logic_or(labels, dim=0, unknown=unknown))
        np.testing.assert_array_equal(result, np.array([unknown, 1, 0, 1], dtype=dtype))
        assert result.dtype == dtype


def test_or_of_numpy_equals_torch():
    rng = np.random.default_rng(0)
    for dtype in (np.int8, np.int64, np.float32, np.uint8, np.bool_):
        targets = rng.integers(-1, 2, (4, 3, 5)).astype(dtype)
        for dim in (0, 1, -1):
            ours = logic_or(targets, dim)
            assert isinstance(ours, np.ndarray)
            np.testing.assert_array_equal(ours, logic_or(torch.from_numpy(targets), dim).numpy())
    assert (logic_or(np.asfortranarray(targets)[:, ::-1]) == logic_or(targets)).all()


def test_numpy_numbers_say_how_many_are_known(full):
    for known in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert (hide_labels(full, known, seed=1) == hide_labels(full, 0.5, seed=1)).all()
    for known in (np.int64(3), np.uint8(3), (np.int32(3), 3)):
        assert (hide_labels(full, known, protocol="per-class") == hide_labels(full, 3, protocol="per-class")).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float32])
def test_bits_are_those_of_plain_comparisons(dtype):
    """Whatever the values: within -1 to 1, outside, between, and no number at all."""
    values = [0, 1] if dtype is torch.bool else [0, 1, 255, 2] if dtype is torch.uint8 else [0, 1, -1]
    for more in ([], [] if dtype in (torch.bool, torch.uint8) else [3, -128]):
        pool = torch.tensor(values + more).to(dtype)
        if dtype.is_floating_point and more:
            pool = torch.cat([pool, torch.tensor([0.5, 1.5, -0.25, 1.001, torch.nan, torch.inf, -torch.inf]).to(dtype)])
        for shape in ((5,), (7, 3), (40, 9605), (0, 4)):
            targets = pool[torch.randint(len(pool), shape)]
            expected = torch.where(targets == 1, -1, torch.where(targets == 0, 0, 1)).to(torch.int8)
            assert torch.equal(to_bits(targets), expected)
            assert torch.equal(to_bits(targets.transpose(0, -1)), expected.transpose(0, -1))


@pytest.mark.parametrize("unknown", [NAN, 0.5, 300, -129])
@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.int8), torch.zeros(2, 2, dtype=torch.int8), np.zeros((2, 2), bool)]
)
def test_logic_or_refuses_an_unknown_that_the_type_cannot_hold(array, unknown):
    """numpy would make it -9223372036854775808, or 0."""
    value = "NaN" if unknown != unknown else unknown
    with pytest.raises(
        TypeError, match=f"targets.dtype={array.dtype} cannot hold unknown={value}: use a floating type"
    ):
        logic_or(array, unknown=unknown)


def test_an_unknown_beyond_a_floating_type_is_refused():
    """On a CPU torch would say so in words of its own, a kernel would make it infinite."""
    labels = torch.zeros(2, 2, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"cannot hold unknown=-1000000000.0: use a wider type"):
        logic_or(labels, unknown=-1e9)
    assert not logic_or(labels, unknown=-math.inf).any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float32", "uint16"])
def test_logic_or_with_an_unknown_of_the_type(dtype):
    labels = np.array([[1, 0, 100, 0], [100, 0, 0, 0]], dtype=dtype)
    wanted = np.array([1, 0, 100, 0], dtype=dtype)
    for got in (logic_or(labels, 0, unknown=100), logic_or(labels, 0, unknown=100.0)):
        assert got.dtype == wanted.dtype
        assert (got == wanted).all()
    if dtype == "uint16":
        with pytest.raises(TypeError, match="torch cannot compute with it"):
            logic_or(torch.from_numpy(labels), 0)
    else:
        assert (logic_or(torch.from_numpy(labels), 0, unknown=100).numpy() == wanted).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_bad_label_is_named_in_any_shape(kind, shape):
    labels = np.zeros(shape)
    labels[tuple(size - 1 for size in shape)] = 7
    place = f"[{', '.join(str(size - 1) for size in shape)}]" if shape else ""
    with pytest.raises(ValueError, match=re.escape(f"targets{place} is 7.0: must be 1, 0 or -1 (unknown)")):
        convert_labels(kind(labels), "logic", "nan")
