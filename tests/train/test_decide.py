"""decide and cft on finished runs: which labels thresholds are fitted on, and which weights they belong to."""

import json
import shutil

import numpy as np
import pytest
import torch
from commands import run as command
from PIL import Image

from gpu_logicmix.cft.heldout import split_known
from gpu_logicmix.data import open_dataset
from gpu_logicmix.data.shapes import CATEGORIES
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.decisions import read_decisions, weights_digest
from gpu_logicmix.labels import hide_labels
from gpu_logicmix.train import decide as deciding
from gpu_logicmix.train import finetune
from gpu_logicmix.train.config import make_config
from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.predict import evaluate_run, kept_weights

_SMALL = """
    --size 32 --model test_resnet --weights none --head linear --epochs 1 --batch-size 20 --accumulate 1 --lr 2e-3
    --cft-epochs 5 --workers 0 --threads 1 --no-cl --no-randaugment
"""
SMALL = _SMALL.split()


def good(*arguments) -> str:
    code, output = command(*arguments)
    assert code == 0, output
    return " ".join(output.split())


# --------------------------------------------------------------------------------------------------- held-out labels
@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A CSV file of 150 images in two splits."""
    folder = tmp_path_factory.mktemp("pictures")
    dataset = open_dataset("shapes", "train", 32, count=150)
    lines = [",".join(["image", "split", *CATEGORIES])]
    for i in range(150):
        image, labels, _ = dataset[i]
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i:03}.png")
        lines.append(",".join([f"{i:03}.png", "train" if i < 120 else "val", *map(str, labels.tolist())]))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("bad", [[], [17, 60]], ids=["all readable", "some unreadable"])
def test_thresholds_are_not_fitted_on_labels_that_fine_tuning_saw(bad, pictures, tmp_path, monkeypatch):
    data = shutil.copytree(pictures, tmp_path / "pictures")
    for row in bad:
        (data / f"{row:03}.png").write_bytes(b"no picture")
    tuned, decided = [], []

    def tune(config, features, labels, *others):
        out = finetune_tuned(config, features, labels, *others)
        tuned.append((labels(0, len(CATEGORIES)), out[2].held_out))
        return out

    def hold(*arguments):
        decided.append(held_out(*arguments))
        return decided[-1]

    finetune_tuned, held_out = finetune._tuned, deciding._held_out
    monkeypatch.setattr(finetune, "_tuned", tune)
    monkeypatch.setattr(deciding, "_held_out", hold)
    options = [*SMALL, "--known", 0.7, "--on-bad-image", "skip", "--out", tmp_path / "run"]
    good("fit", f"csv:{data / 'labels.csv'}", *options)
    assert json.loads((tmp_path / "run" / "cft.json").read_text())["unread"] == bad
    good("decide", tmp_path / "run", "--threads", 1)  # by itself, without what the run knows

    (labels, held) = tuned[0]
    names = [f"{i:03}.png" for i in range(120) if i not in bad]
    wanted = {
        (name, c): labels[i, c] for i, name in enumerate(names) for c in range(len(CATEGORIES)) if held[i, c].item()
    }
    assert len(wanted) > 50
    assert len(decided) == 2
    for dataset, targets, words in decided:
        found = {(dataset.ids[row], c): targets[row, c].item() for row, c in (targets != -1).nonzero().tolist()}
        assert found == wanted
        assert f"{120 - len(bad)} training images" in words


def test_held_out_labels_are_the_same_some_categories_at_a_time(monkeypatch):
    """All labels at once would be 86 GB of OpenImages."""
    config = make_config({"known": 0.7, "seed": 3})
    dense = open_dataset("shapes", "train", 32, count=300)
    dense.labels = hide_labels(dense.labels, 0.7, seed=3)
    sparse = open_dataset("shapes", "train", 32, count=300)
    sparse.labels = SparseLabels.of_dense(dense.labels)
    taken, labels, _ = deciding._held_out(config, dense, None, [4, 200])
    _, held, _ = split_known(
        torch.from_numpy(np.delete(dense.labels, [4, 200], 0)).t(), 0.2, 5, torch.Generator().manual_seed(3)
    )
    assert (labels != -1).sum() == (held != -1).sum() > 100
    monkeypatch.setattr("gpu_logicmix.train.tuneblocks.CELLS", 2 * 300)
    monkeypatch.setattr(type(sparse), "labels_of", lambda self, rows: pytest.fail("asked for whole rows"))
    others, found, _ = deciding._held_out(config, sparse, None, [4, 200])
    assert others.ids == taken.ids
    assert torch.equal(found, labels)


def test_what_fine_tuning_could_not_read_of_runs_before(tmp_path):
    assert deciding.unread_rows(tmp_path) == []
    for text, rows in (("{}", []), ("[]", []), ("", []), ('{"unread": null}', []), ('{"unread": [3, 9]}', [3, 9])):
        (tmp_path / "cft.json").write_text(text)
        assert deciding.unread_rows(tmp_path) == rows


# ------------------------------------------------------------------------------------------- which weights they are of
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    good("fit", "shapes", "-o", "count=200", "--known", 0.7, *SMALL, "--out", folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """One that keeps the weights as trained, and has thresholds of these."""
    folder = shutil.copytree(trained, tmp_path / "run")
    record = json.loads((folder / "cft.json").read_text())
    (folder / "cft.json").write_text(json.dumps({**record, "kept": "model"}))
    deciding.decide(folder, threads=1)
    return folder


def test_decisions_name_their_weights(run):
    for name in ("model", "cft"):
        found = deciding.decide(run, name, threads=1)
        assert (found.weights, found.digest) == (name, weights_digest(run / f"{name}.safetensors"))
        assert len(found.digest) == 16
        assert read_decisions(run, name) == found


def test_decide_waits_for_the_process_that_fine_tunes(run):
    """Only it knows which weights the run keeps, and the others are here minutes before."""

    class LateWorld(World):
        def wait(self):
            record = json.loads((run / "cft.json").read_text())
            (run / "cft.json").write_text(json.dumps({**record, "kept": "cft"}))

    assert kept_weights(run) == "model"
    assert deciding.decide(run, world=LateWorld(0, 1, torch.device("cpu")), threads=1).weights == "cft"


def test_decide_says_if_the_weights_that_are_kept_have_no_thresholds_any_more(run):
    words = f"{run / 'decisions.json'}: has thresholds of the weights cft and none of model, which evaluate, predict"
    assert words in good("decide", run, "--use", "cft", "--threads", 1)
    assert "none of" not in good("decide", run, "--use", "model", "--threads", 1)
    assert "none of" not in good("decide", run, "--threads", 1)


def test_fine_tuning_again_leaves_no_thresholds_of_earlier_weights(run):
    deciding.decide(run, "cft", threads=1)
    assert evaluate_run(run, weights="cft", threads=1).decided is not None
    output = good("cft", run, "--lr", 0.5, "--threads", 1)
    kept = kept_weights(run)
    assert f"has thresholds of earlier weights (cft) and none of {kept}" in output
    assert f"gpu-logicmix decide {run} fits these" in output
    assert "written anew since" in (run / "report.html").read_text()
    output = good("evaluate", run, "--use", "cft", "--threads", 1)
    assert "at the run's thresholds" not in output
    assert f"its thresholds are not used; fit them again: gpu-logicmix decide {run} --use cft" in output
    assert "UserWarning" not in output
    good("decide", run, "--use", "cft", "--threads", 1)
    output = good("evaluate", run, "--use", "cft", "--threads", 1)
    assert "at the run's thresholds" in output
    assert "not used" not in output


def test_fine_tuning_says_nothing_of_thresholds_that_stay(run, monkeypatch):
    monkeypatch.setattr("gpu_logicmix.train.finetune.fine_tune", lambda *given, **options: {})
    assert "thresholds" not in good("cft", run)
    (run / "decisions.json").unlink()
    assert "thresholds" not in good("cft", run)


def test_heads_of_weights_that_a_run_no_longer_ends_with_are_gone(tmp_path):
    arguments = ("fit", "shapes", "-o", "count=60", "--known", 0.7, *SMALL, "--epochs", 2, "--out", tmp_path / "run")
    good(*arguments)
    record = json.loads((tmp_path / "run" / "cft.json").read_text())
    (tmp_path / "run" / "cft.json").write_text(json.dumps({**record, "kept": "cft"}))
    good(*arguments, "--resume", "auto", "--no-decisions", "--no-cft")  # the same weights
    assert kept_weights(tmp_path / "run") == "cft"
    best = torch.load(tmp_path / "run" / "best.pt")["epoch"]
    good(*arguments, "--resume", "auto", "--no-decisions", "--no-cft", "--keep", "last")
    assert kept_weights(tmp_path / "run") == ("cft" if best == 2 else "model")
    assert best == 1


# --------------------------------------------------------------------------------------------------- options and files
@pytest.mark.parametrize("lr", ["-1", "0", "nan"])
def test_a_wrong_learning_rate_is_named_as_it_was_given(run, lr):
    code, output = command("cft", run, "--lr", lr)
    assert code == 1
    assert output.split("error:")[1].strip() == f"--lr {lr}: must be above 0"


def test_evaluate_writes_json_without_nan(run, tmp_path, monkeypatch):
    """Of a category without a known positive there is nothing to say, and of none at all there is no mAP either."""
    empty = torch.zeros(200, len(CATEGORIES), dtype=torch.int8)
    monkeypatch.setattr("gpu_logicmix.data.dataset.ImageDataset.labels_of", lambda self, rows: empty[rows].numpy())
    good("evaluate", run, "--out", tmp_path / "e.json", "--threads", 1)
    values = json.loads((tmp_path / "e.json").read_text(), parse_constant=pytest.fail)
    assert values["mAP"] is values["CF1"] is values["at_thresholds"]["CR"] is None
    assert np.isfinite(values["hamming"])
    assert values["AP"] == {}


def test_evaluate_looks_for_the_folder_before_it_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_logicmix.train.predict.evaluate_run", lambda *given, **options: pytest.fail("evaluated"))
    out = tmp_path / "nowhere" / "e.json"
    for file, words in ((out, f"there is no folder {out.parent}; create it first"), (run, "is a folder; name a file")):
        code, output = command("evaluate", run, "--out", file)
        assert code == 1
        assert f"error: --out {file}: {words}" in output
