"""Sparse labels: whatever is asked of them, the answer is that of the matrix."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import dataset_of

from gpu_logicmix import CurriculumLabels, GPULogicMix, hide_labels, label_counts
from gpu_logicmix.cft import category_wise_fine_tune
from gpu_logicmix.data import DataError, ImageDataset, make_loader, open_dataset, pack_dataset, sparse, spill
from gpu_logicmix.data.sparse import LabelTable, SparseLabels, draws_at, fitting, labels_digest
from gpu_logicmix.data.spill import CellSpill
from gpu_logicmix.report.label_mix import mixed_counts
from gpu_logicmix.report.label_stats import mixed_labels
from gpu_logicmix.train import inputs, tuneblocks
from gpu_logicmix.train.pseudo import SparseCurriculum
from gpu_logicmix.train.tuneblocks import labels_by_category, tuned

MATRICES = st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(0, 2**32 - 1)).map(
    lambda t: np.random.default_rng(t[2]).choice([-1, -1, -1, 0, 1], (t[0], t[1])).astype(np.int8)
)
HIDING = [(0.0, "uniform"), (0.3, "uniform"), (1.0, "uniform"), (0.4, "hcp"), (2, "per-class")]
HIDING += [((1, 3), "per-class"), (0, "per-class"), (None, "single-positive")]


@pytest.fixture(autouse=True, scope="module")
def index(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path_factory.mktemp("index")))
        yield


def equal(labels: SparseLabels, matrix: np.ndarray) -> None:
    assert labels.shape == matrix.shape
    assert np.array_equal(labels.dense(), matrix)
    assert labels.known == (matrix >= 0).sum()
    for row in range(len(matrix)):  # as it must be stored: ascending
        columns = labels.columns[labels.pointers[row] : labels.pointers[row + 1]]
        assert (np.diff(columns) > 0).all()


@settings(max_examples=examples(120), deadline=None)
@given(MATRICES, st.integers(0, 2**64), st.data(), st.sampled_from([1, 7, 1 << 22]))
def test_everything_is_as_of_the_matrix(matrix, seed, data, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "_BLOCK", block)
        labels = SparseLabels.of_dense(matrix)
        equal(labels, matrix)
        assert len(labels) == len(matrix)
        assert labels.size == matrix.size
        assert labels_digest(labels) == labels_digest(matrix)
        for dim in (None, 0, 1):
            for ours, theirs in zip(label_counts(labels, dim), label_counts(matrix, dim), strict=True):
                assert np.array_equal(ours, theirs)
        for known, protocol in HIDING:
            equal(hide_labels(labels, known, seed, protocol), hide_labels(matrix, known, seed, protocol))
        if len(matrix):
            rows = data.draw(st.lists(st.integers(0, len(matrix) - 1), max_size=8))
            assert np.array_equal(labels[rows], matrix[rows])
            equal(labels.take(rows), matrix[rows])
            assert np.array_equal(labels.table()(torch.tensor(rows, dtype=torch.int64)).numpy(), matrix[rows])
            assert np.array_equal(labels[-1], matrix[-1])
            assert np.array_equal(labels.block(1, matrix.shape[1]), matrix[:, 1:])
            assert np.array_equal(labels[1:5:2], matrix[1:5:2])


@settings(max_examples=examples(60), deadline=None)
@given(MATRICES.filter(len), st.integers(0, 99), st.sampled_from([(0.5, 2, 3), (1.0, 2, 4), (1.0, 1, 2), (0.0, 2, 3)]))
def test_mixed_counts_are_those_of_the_matrix(matrix, seed, options):
    mix = GPULogicMix(*options)
    found = mixed_counts(SparseLabels.of_dense(matrix), mix, 5, seed)
    mixed = mixed_labels(matrix, mix, 5, seed)
    for ours, theirs in zip(found.after, label_counts(mixed, 0), strict=True):
        assert np.array_equal(ours, theirs)
    if found.mixed == len(matrix):
        assert [int(c) for c in found.of_mixed] == [int(c) for c in label_counts(mixed)]


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(0, 2**80), st.integers(1, 5000), st.data())
def test_draws_by_place_are_numpys(seed, total, data):
    places = data.draw(st.lists(st.integers(0, total - 1), max_size=20))
    assert np.array_equal(draws_at(seed, np.array(places, dtype=np.int64), total), _all(seed, total)[places])


def _all(seed, total):
    return np.random.default_rng(seed).random(total)


@pytest.mark.parametrize(
    "rows",
    [[-2], [-3, 2, -1], [], np.array([True, False, True]), slice(-2, None), slice(None, None, -1), -1, [3], [-4], 3],
    ids=str,
)
def test_rows_are_those_of_the_matrix(rows):
    matrix = np.array([[1, -1], [0, -1], [-1, 1]], dtype=np.int8)
    labels = SparseLabels.of_dense(matrix)
    try:
        wanted = matrix[rows]
    except IndexError:
        with pytest.raises(IndexError):
            labels[rows]
        return
    assert np.array_equal(labels[rows], wanted)
    if wanted.ndim == 2:
        assert np.array_equal(labels.take(rows).dense(), wanted)


def test_what_is_no_choice_of_rows_is_refused():
    labels = SparseLabels.of_dense(np.zeros((3, 4), dtype=np.int8))
    for rows in ((0, 1), (slice(None), 1), np.array([True, False])):
        with pytest.raises(IndexError):
            labels[rows]


def test_a_part_by_a_mask(tmp_path):
    dataset = dataset_of(tmp_path, count=4)
    part = dataset.take(np.array([False, False, True, True]))
    assert part.ids == list(dataset.ids[2:])
    assert np.array_equal(part.labels, dataset.labels[2:])


def test_draws_far_out():
    """A place that no loop would reach, against numpy's own jump."""
    total = 9_011_219 * 9_605
    places = np.array([0, 1, 12_345_678_901, total - 1])
    expected = [np.random.Generator(np.random.PCG64(5).advance(int(place))).random() for place in places]
    assert draws_at(5, places, total).tolist() == expected


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 1)), max_size=30))
def test_cells_in_any_order(cells):
    for conflict, value in (("unknown", -1), ("present", 1), ("absent", 0)):
        matrix = np.full((5, 4), -1, dtype=np.int8)
        for row in range(5):
            for column in range(4):
                said = {v for r, c, v in cells if (r, c) == (row, column)}
                matrix[row, column] = value if len(said) == 2 else said.pop() if said else -1
        rows, columns, values = np.array(cells, dtype=np.int64).reshape(-1, 3).T
        equal(SparseLabels.of_cells(rows, columns, values, (5, 4), conflict=conflict), matrix)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=30),
    st.sampled_from([1, 4, 1 << 21]),
    st.sampled_from(["unknown", "present", "absent"]),
)
def test_cells_through_a_file(cells, block, conflict):
    """In blocks of any size, in memory and on disk: what sorting all of them at once gives."""
    names, columns, values = (np.array(part, dtype=kind) for part, kind in zip(zip(*cells), ("u8", "i4", "i1")))  # noqa: B905
    names[::2] %= 3  # some images have several labels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "_BLOCK", block)
        patch.setattr(spill, "_IN_MEMORY", 100)
        with CellSpill() as cells:
            cells.add(names[:1], columns[:1], 1 - values[:1])
            cells.clear()  # what an attempt that was given up has left
            for part in np.array_split(np.arange(len(names)), 3):
                cells.add(names[part], columns[part], values[part])
            found = cells.csr(4, conflict)
    ids, rows = np.unique(names, return_inverse=True)
    expected = SparseLabels.of_cells(rows, columns, values, (len(ids), 4), conflict=conflict)
    assert np.array_equal(found["ids"], ids)
    for name in ("pointers", "columns", "values"):
        assert np.array_equal(found[name], getattr(expected, name))


def test_conflicts_can_be_errors():
    with pytest.raises(DataError, match="row 1 column 2"):
        SparseLabels.of_cells(
            [1, 0, 1], [2, 2, 2], [1, 1, 0], (2, 4), conflict=lambda r, c: DataError(f"row {r} column {c}")
        )


def test_real_labels_of_coco(shared):
    npz = np.load(shared / "data" / "coco2014_labels.npz")
    full = npz["labels"][npz["split"] == "train"].astype(np.int8)
    few = full[:6000]  # where the matrix needs a sort of all of its cells
    hiding = [(full, 0.1, "uniform"), (few, 0.3, "hcp"), (few, 100, "per-class"), (few, None, "single-positive")]
    for whole, known, protocol in hiding:
        labels = SparseLabels.of_dense(whole)
        assert labels_digest(labels) == labels_digest(whole)
        thin, matrix = (hide_labels(x, known, 7, protocol) for x in (labels, whole))
        assert np.array_equal(thin.dense(), matrix)
        assert labels_digest(thin) == labels_digest(matrix)
        rows = np.random.default_rng(0).permutation(len(whole))[:256]
        assert np.array_equal(thin[rows], matrix[rows])
        for dim in (None, 0, 1):
            for ours, theirs in zip(thin.counts(dim), label_counts(matrix, dim), strict=True):
                assert np.array_equal(ours, theirs)


def test_batches_of_a_dataset_are_the_same(tmp_path, monkeypatch):
    dense = dataset_of(tmp_path)
    thin = ImageDataset("test", "train", dense.source, SparseLabels.of_dense(dense.labels), dense.categories, dense.ids)
    assert thin.fingerprint() == dense.fingerprint()
    assert "sparse labels" in repr(thin)
    for ours, theirs in zip(make_loader(thin, 4, shuffle=True), make_loader(dense, 4, shuffle=True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(thin[3][1], dense[3][1])
    assert np.array_equal(thin.labels_of([5, 1]), dense.labels_of([5, 1]))
    part = thin.take([7, 2, 3])
    assert isinstance(part.labels, np.ndarray)  # small enough now
    monkeypatch.setattr(sparse, "DENSE_CELLS", 0)
    part = thin.take([7, 2, 3])
    assert isinstance(part.labels, SparseLabels)
    assert part.fingerprint() == dense.take([7, 2, 3]).fingerprint()
    thin.labels = hide_labels(thin.labels, 0.5, seed=1)
    assert np.array_equal(thin.labels.dense(), hide_labels(dense.labels, 0.5, seed=1))
    with pytest.raises(DataError, match="do not fit"):
        thin.labels = SparseLabels.of_dense(dense.labels[:4])


def test_dense_where_it_is_small(monkeypatch):
    labels = SparseLabels.of_dense(np.zeros((4, 5), dtype=np.int8))
    assert isinstance(fitting(labels), np.ndarray)
    assert fitting(labels, "sparse") is labels
    monkeypatch.setattr(sparse, "DENSE_CELLS", 19)
    assert fitting(labels) is labels
    assert isinstance(fitting(labels, "dense"), np.ndarray)
    assert isinstance(fitting(np.zeros((4, 5), dtype=np.int8)), np.ndarray)
    with pytest.raises(DataError, match="labels='thin': must be auto, dense or sparse"):
        fitting(labels, "thin")


def test_table_needs_no_sync_and_compiles():
    """On meta there is no value to read: a sync would raise."""
    labels = SparseLabels.of_dense(np.random.default_rng(0).integers(-1, 2, (20, 7)).astype(np.int8))
    assert LabelTable(labels).to("meta")(torch.zeros(5, dtype=torch.int64, device="meta")).shape == (5, 7)
    table = torch.compile(labels.table(), fullgraph=True, backend="eager", dynamic=True)
    for count in (3, 8, 1):
        rows = torch.arange(count)
        assert np.array_equal(table(rows).numpy(), labels[rows.numpy()])


@pytest.mark.parametrize("select", ["score", "positive-score"])
def test_pseudo_labels_are_those_of_the_matrix(shared, select):
    """On real labels, where no sample has too many; and what is kept where one has."""
    npz = np.load(shared / "data" / "coco2014_labels.npz")
    full = npz["labels"][npz["split"] == "train"][:3000].astype(np.int8)
    matrix = hide_labels(full, 0.1, 3)
    options = {"theta_pos": 1.0, "theta_neg": -1.5, "select": select}
    dense = CurriculumLabels(matrix, full=full, **options)
    thin, whole = (SparseLabels.of_dense(x) for x in (matrix, full))
    ours = SparseCurriculum(thin, full=whole, per_sample=80, **options)
    assert torch.equal(ours.lookup(torch.arange(3000)), dense.lookup(torch.arange(3000)))
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):  # the second update forgets the first
        for table in (dense, ours):
            table.begin_update()
        for index in torch.randperm(3000, generator=rng)[:2000].split(128):
            logits = torch.randn(len(index), 80, generator=rng) * 2
            logits[0, :5], logits[1, 0], logits[1, 1] = torch.nan, torch.inf, -torch.inf
            index[-1] = index[0]  # twice in a batch: the last one counts
            for table in (dense, ours):
                table.update(index, logits)
        for table in (dense, ours):
            table.end_update()
        assert torch.equal(ours.lookup(torch.arange(3000)), dense.lookup(torch.arange(3000)))
        assert list(ours.counts()) == pytest.approx(list(dense.counts()), rel=0, abs=0, nan_ok=True)
    again = SparseCurriculum(thin, per_sample=80, **options)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.lookup(torch.arange(3000)), ours.lookup(torch.arange(3000)))
    with pytest.raises(ValueError, match="other known labels"):
        SparseCurriculum(whole, per_sample=80).load_state_dict(ours.state_dict())
    few = SparseCurriculum(SparseLabels.of_dense(np.full((1, 6), -1, dtype=np.int8)), per_sample=3)
    few.update(torch.tensor([0]), torch.tensor([[-9.0, 3.0, -4.0, 0.0, 5.0, -5.0]]))
    assert few.lookup(torch.tensor([0])).tolist() == [[0, 1, -1, -1, 1, -1]]  # present ones first, then the surest


def test_fine_tuning_by_blocks_of_categories(shared, monkeypatch):
    """Sparse labels give the heads of the matrix bit for bit, and blocks those of all categories at once."""
    npz = np.load(shared / "data" / "coco2014_labels.npz")
    full = npz["labels"][npz["split"] == "train"][:3000, :12].astype(np.int8)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(3000, 24)).astype(np.float32)
    features = torch.from_numpy(full @ rng.normal(size=(12, 24)).astype(np.float32) + 2 * noise)
    matrix = hide_labels(full, 0.3, 1)
    weight, bias = torch.from_numpy(rng.normal(size=(12, 24)).astype(np.float32) / 5), torch.zeros(12)
    options = {"epochs": 6, "lr": 0.02, "seed": 0}
    found = {}
    for name, labels, cells in (
        ("dense", matrix, 10**9),
        ("sparse", SparseLabels.of_dense(matrix), 10**9),
        ("blocks", SparseLabels.of_dense(matrix), 5 * 2000),
    ):
        dataset = SimpleNamespace(labels=labels)
        parts = [labels_by_category(dataset, rows) for rows in (np.arange(2000), np.arange(2000, 3000))]
        monkeypatch.setattr(tuneblocks, "CELLS", cells)
        found[name] = tuned(features[:2000], parts[0], weight, bias, (features[2000:], parts[1]), **options)
    expected = category_wise_fine_tune(
        features[:2000], matrix[:2000], weight, bias, evaluation=(features[2000:], matrix[2000:]), **options
    )
    for name in ("dense", "sparse"):
        assert torch.equal(found[name][0], expected[0])
        assert torch.equal(found[name][1], expected[1])
        assert found[name][2].summary() == expected[2].summary()
    torch.testing.assert_close(found["blocks"][0], expected[0], atol=1e-5, rtol=1e-4)
    ours, theirs = found["blocks"][2], expected[2]
    assert len(theirs.changed) > 6
    for name in ("ap_before", "ap_after", "evaluation_before", "evaluation_after", "history"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), equal_nan=True, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.best_epoch, theirs.best_epoch)
    assert ours.gain == pytest.approx(theirs.gain, abs=1e-6)
    low, high = ours.gain_interval
    assert low < ours.gain < high
    assert low <= theirs.gain_interval[0] + 0.002  # not narrower, but for the other draws
    assert high >= theirs.gain_interval[1] - 0.002


@pytest.mark.slow
def test_a_run_on_sparse_labels_gives_the_same_weights(tmp_path, monkeypatch):
    """Mixing, pseudo-labels, evaluation and fine-tuning included, bit for bit; and on shards those of the files.
    In the last one no matrix is allowed: pseudo-labels are sparse as well."""
    from safetensors.torch import load_file

    from gpu_logicmix import Config, fit

    for split in ("train", "val"):
        pack_dataset(open_dataset("shapes", split, 32, count=40), tmp_path / "shards", per_shard=7)
    runs = {"dense": ("shapes", []), "sparse": ("shapes", ["labels=sparse"])}
    runs["shards"] = (f"tar:{tmp_path / 'shards'}", ["labels=sparse"])
    weights = {}
    for name, (data, option) in runs.items():
        monkeypatch.setattr(inputs, "MATRIX_LIMIT", 0 if name == "shards" else 10**9)
        option = [*option, *(["count=40"] if data == "shapes" else [])]
        config = Config(
            data=data, option=option, size=32, known=0.6, model="test_resnet", weights="none", epochs=2, batch_size=8,
            cl=True, cl_start=1, theta_pos=0.1, theta_neg=-0.1, cft=True, cft_epochs=3, workers=0, device="cpu",
            threads=1, amp="off",
        )  # fmt: skip
        fit(config, tmp_path / name)
        weights[name] = [load_file(tmp_path / name / f"{file}.safetensors") for file in ("model", "cft")]
    for name in runs:
        for ours, theirs in zip(weights[name], weights["dense"], strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
