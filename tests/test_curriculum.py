"""curriculum.py: the table against dictionaries, two real processes against one, no wait for the device."""

import math
from fractions import Fraction

import launch
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gpu_logicmix import CurriculumLabels, hide_labels
from gpu_logicmix.curriculum import SELECTIONS

NAN, INF = float("nan"), float("inf")
above = np.nextafter(np.float32(2.5), np.float32(9)).item()
below = np.nextafter(np.float32(-1), np.float32(-9)).item()
# At, just above and just below theta_pos=2.5 and theta_neg=-1; sure; not sure; not a number.
LOGITS = [2.5, above, 2 * 2.5 - above, -1.0, below, -2 - below, 0.0, -0.0, 7.0, -7.0, NAN, INF, -INF]


# -------------------------------------------------------------------------------------------------------------- oracles
def score_oracle(known: dict, calls: list, theta_pos: float, theta_neg: float) -> dict:
    """(sample, category) -> label, after the calls of one update, label by label in the order they come."""
    table = dict(known)
    for index, rows in calls:
        for sample, row in zip(index, rows, strict=True):
            for category, logit in enumerate(row):
                if known[sample, category] != -1:
                    continue
                table[sample, category] = -1
                if logit > theta_pos:
                    table[sample, category] = 1
                if logit < theta_neg:
                    table[sample, category] = 0
    return table


def top_oracle(known: dict, calls: list, fraction: float, per_category: bool) -> dict:
    logits = {}
    for index, rows in calls:
        for sample, row in zip(index, rows, strict=True):
            logits.update({(sample, category): logit for category, logit in enumerate(row)})
    table = dict(known)
    categories = sorted({category for _, category in known})
    for wanted in [[c] for c in categories] if per_category else [categories]:
        unknown = sorted(place for place in known if known[place] == -1 and place[1] in wanted)
        ranked = [place for place in unknown if not math.isnan(logits.get(place, NAN))]
        ranked.sort(key=lambda place: -abs(logits[place]))  # a stable sort: ties go to the earlier sample
        for place in ranked[: math.floor(Fraction(str(fraction)) * len(unknown))]:
            table[place] = int(logits[place] > 0)
    return table


def as_dict(table: torch.Tensor) -> dict:
    return {(i, c): label for i, row in enumerate(table.tolist()) for c, label in enumerate(row)}


@st.composite
def updates(draw, epochs=3):
    """Labels [N, C], and for each epoch a list of (index, logits): samples left out, repeated, in any order."""
    n, c = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    labels = draw(st.lists(st.lists(st.sampled_from([-1, -1, 0, 1]), min_size=c, max_size=c), min_size=n, max_size=n))
    row = st.lists(st.sampled_from(LOGITS), min_size=c, max_size=c)
    call = st.lists(st.tuples(st.integers(0, n - 1), row), max_size=8)
    calls = draw(st.lists(st.lists(call, max_size=3), min_size=epochs, max_size=epochs))
    return torch.tensor(labels), [[([i for i, _ in c], [r for _, r in c]) for c in epoch] for epoch in calls]


def run(curriculum: CurriculumLabels, calls: list) -> None:
    curriculum.begin_update()
    for index, rows in calls:
        logits = torch.tensor(rows).reshape(len(index), curriculum.known.shape[1])
        curriculum.update(torch.tensor(index, dtype=torch.int64), logits)
    curriculum.end_update()


# ---------------------------------------------------------------------------------------------------------------- table
@settings(max_examples=examples(200), deadline=None)
@given(updates())
def test_score_is_the_oracle_over_several_epochs(case):
    labels, epochs = case
    known = as_dict(labels)
    curriculum = CurriculumLabels(labels, theta_pos=2.5, theta_neg=-1)
    for calls in epochs:
        run(curriculum, calls)
        assert as_dict(curriculum.table) == score_oracle(known, calls, 2.5, -1)
        everyone = torch.arange(len(labels)).flip(0).repeat(2)
        assert torch.equal(curriculum.lookup(everyone), curriculum.table[everyone])


@settings(max_examples=examples(50), deadline=None)
@given(updates())
def test_positive_score_never_says_absent(case):
    labels, epochs = case
    curriculum = CurriculumLabels(labels, theta_pos=2.5, theta_neg=-1, select="positive-score")
    for calls in epochs:
        run(curriculum, calls)
        wanted = score_oracle(as_dict(labels), calls, 2.5, -INF)
        assert as_dict(curriculum.table) == wanted


@settings(max_examples=examples(200), deadline=None)
@given(updates(), st.sampled_from(SELECTIONS), st.data())
def test_marks_stay_and_known_labels_too(case, select, data):
    """Updates, marks and reloads in any order: what was marked and not known is present in every later lookup."""
    labels, epochs = case
    known, marked = as_dict(labels), set()
    curriculum = CurriculumLabels(labels, theta_pos=2.5, theta_neg=-1, select=select)
    plain = CurriculumLabels(labels, theta_pos=2.5, theta_neg=-1, select=select)
    everyone = torch.arange(len(labels))
    for calls in epochs:
        cells = data.draw(st.sets(st.sampled_from(sorted(known)), max_size=4))
        where = torch.zeros(labels.shape, dtype=torch.bool)
        for cell in cells:
            where[cell] = True
        twice = torch.cat([everyone, everyone])  # a sample that is in a batch twice: either mark counts
        curriculum.mark_positive(twice, torch.cat([where, torch.zeros_like(where)]))
        marked |= {cell for cell in cells if known[cell] == -1}
        run(curriculum, calls)
        run(plain, calls)
        expected = as_dict(plain.lookup(everyone)) | dict.fromkeys(marked, 1)
        assert as_dict(curriculum.lookup(everyone)) == expected
        state = curriculum.state_dict()
        curriculum = CurriculumLabels(labels, theta_pos=2.5, theta_neg=-1, select=select)
        curriculum.load_state_dict(state)
        assert curriculum.counts().positives == sum(known[c] == -1 and expected[c] == 1 for c in known)


@pytest.mark.parametrize("select", SELECTIONS)
def test_first_use_under_inference_mode(select):
    curriculum = CurriculumLabels(torch.full((3, 2), -1), select=select, fraction=1.0)
    with torch.inference_mode():
        run(curriculum, [([0, 1, 2], [[5.0, 5.0]] * 3)])
    run(curriculum, [([0, 1, 2], [[5.0, 5.0]] * 3)])
    assert (curriculum.table == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_nan_is_unknown(dtype):
    labels = np.array([[NAN, 1, 0], [-1, NAN, NAN]], dtype=dtype)
    for each in (labels, torch.from_numpy(labels)):
        assert CurriculumLabels(each, full=each).known.tolist() == [[-1, 1, 0], [-1, -1, -1]]


@settings(max_examples=examples(200), deadline=None)
@given(updates(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.booleans())
def test_top_is_the_oracle_over_several_epochs(case, fraction, per_category):
    labels, epochs = case
    curriculum = CurriculumLabels(labels, select="top-per-category" if per_category else "top", fraction=fraction)
    for calls in epochs:
        run(curriculum, calls)
        assert as_dict(curriculum.table) == top_oracle(as_dict(labels), calls, fraction, per_category)


@pytest.mark.parametrize("select", ["top", "top-per-category"])
def test_a_fraction_of_unknown_labels_is_not_one_short(select):
    """100 * 0.29 is 28.999999999999996 in floating point."""
    for unknown in (100, 1000):
        for percent in range(101):
            curriculum = CurriculumLabels(torch.full((unknown, 1), -1), select=select, fraction=percent / 100)
            run(curriculum, [(list(range(unknown)), [[1.0]] * unknown)])
            assert curriculum.counts().positives == percent * unknown // 100


def test_an_index_of_any_whole_type():
    known = torch.tensor([[1, -1], [-1, 0], [-1, -1]])
    for dtype in (torch.uint8, torch.int32, torch.int64):
        for select in ("score", "top"):
            curriculum, index = CurriculumLabels(known, select=select, fraction=1.0), torch.tensor([2, 0], dtype=dtype)
            curriculum.begin_update()
            curriculum.update(index, torch.tensor([[3.0, -3.0], [-3.0, 3.0]]))
            curriculum.end_update()
            assert curriculum.lookup(index).tolist() == [[1, 0], [1, 1]]
            curriculum.mark_positive(index, torch.ones(2, 2, dtype=torch.bool))
            assert curriculum.lookup(index).tolist() == [[1, 1], [1, 1]]
    for index in (torch.tensor([1.0]), torch.tensor([True])):
        for call in (curriculum.lookup, lambda index: curriculum.update(index, torch.zeros(1, 2))):
            with pytest.raises(TypeError, match=f"index is {index.dtype}: must be the numbers of samples"):
                call(index)


def test_thresholds_are_strict(device):
    curriculum = CurriculumLabels(torch.full((1, 7), -1, device=device), 2.5, -1)
    curriculum.update(torch.tensor([0]), torch.tensor([[*LOGITS[:6], NAN]], device=device))
    assert curriculum.lookup(torch.tensor([0])).tolist() == [[-1, 1, -1, -1, 0, -1, -1]]


def test_threshold_is_not_rounded_to_the_type_of_the_logits():
    logit = torch.tensor([[2.296875]], dtype=torch.bfloat16)
    assert torch.tensor(2.29, dtype=torch.bfloat16) == logit  # in bfloat16 the two are one number
    curriculum = CurriculumLabels(torch.tensor([[-1]]), theta_pos=2.29)
    curriculum.update(torch.tensor([0]), logit)
    assert curriculum.table.item() == 1


def test_known_labels_never_change(device):
    known = hide_labels(torch.randint(0, 2, (50, 9), device=device), 0.5)
    for select in ("score", "top", "top-per-category"):
        curriculum = CurriculumLabels(known, 0.0, 0.0, select=select, fraction=1.0)
        for _ in range(3):
            curriculum.begin_update()
            curriculum.update(torch.arange(50), torch.randn(50, 9, device=device) * 9)
            curriculum.end_update()
            assert torch.equal(curriculum.table[known != -1], known[known != -1].to(torch.int8))
            assert (curriculum.table != -1).all()  # all unknown labels did get one


def test_pseudo_labels_last_one_epoch():
    curriculum = CurriculumLabels(torch.full((2, 1), -1))
    run(curriculum, [([0, 1], [[5.0], [5.0]])])
    assert curriculum.table.tolist() == [[1], [1]]
    run(curriculum, [([0], [[0.0]])])  # sample 0 is not confirmed, sample 1 not even seen
    assert curriculum.table.tolist() == [[-1], [-1]]


def test_targets_are_copied():
    targets = np.full((2, 2), -1, dtype=np.int8)
    curriculum = CurriculumLabels(targets)
    curriculum.update(torch.arange(2), torch.full((2, 2), 9.0))
    assert (targets == -1).all()
    targets[:] = 0
    curriculum.begin_update()
    assert (curriculum.table == -1).all()


# --------------------------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize("at_a_time", [1 << 26, 35])
def test_counts_against_dictionaries(monkeypatch, at_a_time):
    monkeypatch.setattr("gpu_logicmix.curriculum._COUNTED", at_a_time)
    torch.manual_seed(0)
    full = (torch.rand(60, 5) < 0.3).int()
    known = hide_labels(full, 0.4)
    full[0] = -1  # true labels that nobody knows
    curriculum = CurriculumLabels(known, 1.0, -0.5, full=full)
    curriculum.update(torch.arange(60), torch.randn(60, 5) + 2 * full)
    table, true = as_dict(curriculum.table), as_dict(full)
    hidden = [place for place, label in as_dict(known).items() if label == -1]
    counts = curriculum.counts()
    assert counts.positives == sum(table[p] == 1 for p in hidden) > 5
    assert counts.negatives == sum(table[p] == 0 for p in hidden) > 5
    assert counts.unknown == sum(table[p] == -1 for p in hidden) > 5

    def share(wanted, among):
        return sum(table[p] == true[p] and table[p] in wanted for p in among) / len(among)

    for wanted, precision, recall in (
        ((0, 1), counts.precision, counts.recall),
        ((1,), counts.precision_positive, counts.recall_positive),
        ((0,), counts.precision_negative, counts.recall_negative),
    ):
        assert precision == share(wanted, [p for p in hidden if table[p] in wanted and true[p] != -1])
        assert recall == share(wanted, [p for p in hidden if true[p] in wanted])


def test_counts_without_full_labels_and_without_pseudo_labels():
    assert CurriculumLabels(torch.tensor([[-1, 1, -1]])).counts() == (0, 0, 2, *[None] * 6)
    empty = CurriculumLabels(torch.tensor([[-1, 1]]), full=torch.tensor([[0, 1]])).counts()
    assert math.isnan(empty.precision)
    assert empty.recall == 0
    assert math.isnan(empty.recall_positive)


# ---------------------------------------------------------------------------------------------------------------- state
@pytest.mark.parametrize("select", ["score", "top"])
def test_state_dict_brings_the_pseudo_labels_back(select):
    targets = hide_labels(torch.ones(8, 3, dtype=torch.int8), 0.3)
    first, second = (CurriculumLabels(targets, select=select) for _ in range(2))
    run(first, [(range(8), (torch.randn(8, 3) * 5).tolist())])
    assert not torch.equal(first.table, second.table)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.table, second.table)


def test_state_dict_of_other_known_labels_is_refused():
    first, second = CurriculumLabels(torch.tensor([[1, -1]])), CurriculumLabels(torch.tensor([[0, -1]]))
    with pytest.raises(ValueError, match="1 of 2 differ"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        CurriculumLabels(torch.tensor([[1]])).load_state_dict(first.state_dict())


# --------------------------------------------------------------------------------------------------------------- device
@pytest.mark.parametrize("select", SELECTIONS)
def test_no_wait_for_the_device(select):
    curriculum = CurriculumLabels(torch.full((40, 5), -1), select=select)
    with FakeTensorMode(allow_non_fake_inputs=True):
        curriculum.to("cuda")
        on_cpu, on_cuda = torch.randint(40, (8,)), torch.randint(40, (8,), device="cuda")
        curriculum.begin_update()
        curriculum.mark_positive(on_cpu, torch.zeros(8, 5, device="cuda", dtype=torch.bool))
        for index in (on_cpu, on_cuda):
            curriculum.update(index, torch.randn(8, 5, device="cuda", dtype=torch.bfloat16))
        curriculum.end_update()
        assert curriculum.lookup(on_cpu).device.type == "cuda"
        with pytest.raises(DataDependentOutputException):  # the check sees a wait where there is one
            curriculum.counts()


def some_marks(index: torch.Tensor, epoch: int) -> torch.Tensor:
    """Labels that are marked in an epoch, of 4 categories."""
    return (index[:, None] * 4 + torch.arange(4)) % 11 == epoch


def one_rank(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    targets, epochs = torch.load(f"{folder}/case.pt")
    for select in SELECTIONS:
        curriculum = CurriculumLabels(targets, select=select)
        tables = []
        for epoch, logits in enumerate(epochs):
            mine = torch.arange(len(targets))[rank::world]
            curriculum.mark_positive(mine, some_marks(mine, epoch))
            curriculum.begin_update()
            for index in mine.split(3):
                curriculum.update(index, logits[index])
            curriculum.end_update()
            tables.append(curriculum.table.clone())
        torch.save(tables, f"{folder}/{select}-{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_make_the_table_of_one(tmp_path):
    torch.manual_seed(0)
    targets = hide_labels(torch.randint(0, 2, (23, 4)), 0.3)  # 23: the shares are of different size
    epochs = [torch.randn(23, 4) * 3 for _ in range(3)]
    epochs[1][5:9] = NAN
    epochs[2][3, :2] = torch.tensor([INF, -INF])
    torch.save((targets, epochs), tmp_path / "case.pt")
    launch.serve()
    mp.start_processes(one_rank, (2, str(tmp_path)), nprocs=2, start_method=launch.CONTEXT.get_start_method())
    for select in SELECTIONS:
        alone = CurriculumLabels(targets, select=select)
        first, second = (torch.load(tmp_path / f"{select}-{rank}.pt") for rank in range(2))
        for epoch, logits in enumerate(epochs):
            alone.mark_positive(torch.arange(23), some_marks(torch.arange(23), epoch))
            alone.begin_update()
            alone.update(torch.arange(23), logits)
            alone.end_update()
            assert (alone.table != targets).sum() > 10
            assert torch.equal(first[epoch], alone.table)
            assert torch.equal(second[epoch], alone.table)


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"targets": torch.tensor([[2]])}, ValueError, r"targets\[0, 0\] is 2"),
        ({"targets": torch.zeros(3)}, ValueError, r"targets has shape \(3,\)"),
        ({"targets": [[0]]}, TypeError, "targets is a list"),
        ({"targets": torch.zeros(1, 1), "theta_pos": -3.0}, ValueError, "theta_neg must not be above theta_pos"),
        ({"targets": torch.zeros(1, 1), "theta_pos": NAN}, ValueError, "theta_neg must not be above theta_pos"),
        (
            {"targets": torch.zeros(1, 1), "select": "best"},
            ValueError,
            "the selections are score, positive-score, top",
        ),
        ({"targets": torch.zeros(1, 1), "fraction": 1.5}, ValueError, "fraction=1.5: must be from 0 to 1"),
        ({"targets": torch.zeros(1, 1), "full": torch.zeros(1, 2)}, ValueError, r"full has shape \(1, 2\)"),
    ],
)
def test_errors_name_argument_value_and_rule(arguments, error, message):
    with pytest.raises(error, match=message):
        CurriculumLabels(**arguments)


def test_update_refuses_what_does_not_fit():
    curriculum = CurriculumLabels(torch.full((4, 2), -1), select="top")
    with pytest.raises(ValueError, match=r"logits has shape \(3, 2\): must be \[2, 2\]"):
        curriculum.update(torch.tensor([0, 1]), torch.zeros(3, 2))
    for index in ([-1], [4]):
        with pytest.raises((IndexError, RuntimeError)):
            curriculum.update(torch.tensor(index), torch.zeros(1, 2))
        with pytest.raises((IndexError, RuntimeError)):
            curriculum.lookup(torch.tensor(index))
