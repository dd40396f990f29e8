"""A run in its folder: when it has ended, what it refuses to write over, and what it notices on resuming."""

import shutil
import signal
from pathlib import Path

import pytest
from commands import run as command
from PIL import Image
from runs import train

from gpu_logicmix.errors import RunError
from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint, read_config
from gpu_logicmix.train.signals import Interrupted

OPTIONS = (
    "--size 32 --model test_resnet --weights none --head linear --epochs 1 --workers 0 --threads 1 --no-cl --no-cft"
)


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("once") / "run"
    train(folder, decisions=False)
    return folder


@pytest.fixture
def finished(once, tmp_path) -> Path:
    return Path(shutil.copytree(once, tmp_path / "run"))


# -------------------------------------------------------------------------------------------------- has it ended?
def test_weights_without_a_checkpoint_are_not_written_over(finished):
    (finished / "last.pt").unlink()
    (finished / "previous.pt").unlink()
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert train(finished, "auto", decisions=False)["kind"] == "end"  # with the same options it has ended
    with pytest.raises(RunError, match="has the weights of a run, but no checkpoint to resume from; choose another"):
        train(finished, "auto", decisions=False, epochs=3)
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }


def test_the_end_is_done_again_with_other_options_and_only_then(finished, monkeypatch):
    ends = []
    close = loop.close_run
    monkeypatch.setattr(loop, "close_run", lambda run, *rest: ends.append(run.config.keep) or close(run, *rest))
    for keep, count in (("best", 0), ("last", 1), ("last", 1), ("best", 2), ("best", 2)):
        assert train(finished, "auto", decisions=False, keep=keep)["kept"] == keep
        assert len(ends) == count
    assert not (finished / "decisions.json").exists()
    train(finished, "auto", decisions=True)
    assert (finished / "decisions.json").exists()
    assert len(ends) == 3
    train(finished, "auto", decisions=True)
    assert len(ends) == 3


def test_resuming_after_the_last_epoch_says_so(finished):
    code, output = command("fit", "--out", finished, "--resume", "--keep", "last")
    assert code == 0, output
    assert "resuming at step 6 (after the last epoch)" in output


def test_a_preset_cannot_join_a_run(finished):
    code, output = command("fit", "--out", finished, "--resume", "auto", "--preset", "paper-voc")
    assert code == 1
    assert "--preset paper-voc:" in output
    assert "has a run with its own options; leave --preset out" in output


# ------------------------------------------------------------------------------------------------ what it is judged by
def photos(root: Path, count: int = 12) -> Path:
    root.mkdir()
    for name in ("train", "val"):
        rows = ["image,red,green"]
        for n in range(count):
            Image.new("RGB", (8, 8), ((n * 20) % 256, 0, 99)).save(root / f"{name}{n}.png")
            rows.append(f"{name}{n}.png,{n % 2},{n % 3 // 2}")
        (root / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return root


def interrupted(folder: Path, monkeypatch, **options) -> None:
    """Stopped after its first epoch."""
    with monkeypatch.context() as patch:
        close = loop.Training.close_epoch

        def then_stop(self, log, tick, stop):
            close(self, log, tick, stop)
            stop.stop(signal.SIGTERM, "stopped")

        patch.setattr(loop.Training, "close_epoch", then_stop)
        with pytest.raises(Interrupted):
            train(folder, **options)


def test_validation_images_exchanged_before_resuming_are_noticed(tmp_path, monkeypatch):
    root, folder = photos(tmp_path / "photos"), tmp_path / "run"
    options = {"data": f"csv:{root}", "option": None, "known": 1.0}
    interrupted(folder, monkeypatch, **options)
    moved = shutil.copytree(root, tmp_path / "moved")
    text = (root / "val.csv").read_text()
    (root / "val.csv").write_text(text.replace("val0.png,0", "val0.png,1"))
    with pytest.raises(RunError, match=r"labels of the images to validate on changed since .*run was started"):
        train(folder, "must", **options)
    (root / "val.csv").write_text(text)
    Image.new("RGB", (9, 9)).save(root / "val3.png")
    with pytest.raises(RunError, match="file sizes, file dates of the images to validate on changed"):
        train(folder, "must", **options)
    train(folder, "must", **{**options, "data": f"csv:{moved}"})  # a copy of what was there
    assert read_checkpoint(folder / "last.pt")["closed"] == 2


def test_images_to_tune_by_are_looked_at_too(tmp_path, monkeypatch):
    root, folder = photos(tmp_path / "photos", 20), tmp_path / "run"
    options = {"data": f"csv:{root}", "option": None, "known": 1.0, "tune_images": 6}
    interrupted(folder, monkeypatch, **options)
    state = read_checkpoint(folder / "last.pt")
    state["judged_by"][1]["labels"] = "another"
    loop.write_checkpoint(folder / "last.pt", state)
    with pytest.raises(RunError, match="tune_images=6: labels of the images to validate on changed"):
        train(folder, "must", **options)


def test_a_root_of_images_is_kept_as_a_whole_path(tmp_path, monkeypatch):
    root = photos(tmp_path / "photos")
    (root / "lists").mkdir()
    for name in ("train.csv", "val.csv"):
        (root / name).rename(root / "lists" / name)
    monkeypatch.chdir(root)
    code, output = command("fit", "csv:lists", "-o", "root=.", *OPTIONS.split(), "--out", tmp_path / "run")
    assert code == 0, output
    assert read_config(tmp_path / "run").option == [f"root={root}"]
    monkeypatch.chdir(tmp_path)
    code, output = command("evaluate", tmp_path / "run")
    assert code == 0, output


def test_a_root_of_images_is_not_that_of_other_data(tmp_path):
    """Else images of the same names would be taken from the old folder."""
    root, other = photos(tmp_path / "photos"), photos(tmp_path / "other")
    code, output = command("fit", f"csv:{root}", "-o", f"root={root}", *OPTIONS.split(), "--out", tmp_path / "run")
    assert code == 0, output
    code, output = command("evaluate", tmp_path / "run", "--data", f"csv:{root}", "--split", "train")
    assert code == 0, output
    (other / "train0.png").write_bytes(b"broken")
    code, output = command("evaluate", tmp_path / "run", "--data", f"csv:{other}", "--split", "train")
    assert code == 1
    assert f"the run has the option root={root} for its own data" in output
    assert "--option root=DIR" in output
    run = ("evaluate", tmp_path / "run", "--data", f"csv:{other}", "--split", "train", "-o")
    code, output = command(*run, f"root={other}")
    assert code == 1
    assert "cannot be decoded" in output
    code, output = command(*run, f"root={root}")
    assert code == 0, output


# -------------------------------------------------------------------------------------------------------- odds and ends
@pytest.mark.parametrize("stop", ["early", "late"])
def test_the_exit_code_says_whether_anything_was_saved(tmp_path, monkeypatch, stop):
    name = "__init__" if stop == "early" else "close_epoch"
    before = getattr(loop.Training, name)

    def then_stop(self, *arguments):
        before(self, *arguments)
        loop.StopSignals(self.folder).stop(signal.SIGTERM, "stopped")

    monkeypatch.setattr(loop.Training, name, then_stop)
    code, _ = command("fit", "shapes", "-o", "count=24", *OPTIONS.split(), "--out", tmp_path / "run")
    assert code == (128 + signal.SIGTERM if stop == "early" else 0)
    assert (tmp_path / "run" / "last.pt").exists() == (stop == "late")


def test_a_run_with_sparse_labels_has_a_report(tmp_path):
    code, output = command(
        "fit", "shapes", "-o", "count=24", "-o", "labels=sparse", *OPTIONS.split(), "--out", tmp_path / "run"
    )
    assert code == 0, output
    assert "train positives" in (tmp_path / "run" / "report.html").read_text()


def test_a_report_runs_no_code_that_a_folder_names(finished, monkeypatch, tmp_path):
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w')\n\ndef make():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = finished / "config.toml"
    file.write_text(file.read_text() + '\naugment = "theirs:make"\n')
    code, output = command("report", finished)
    assert code == 0, output
    assert (finished / "report.html").exists()
    assert not (tmp_path / "seen").exists()
    lines = [line for line in file.read_text().splitlines() if not line.startswith(("head =", "augment ="))]
    file.write_text("\n".join([*lines, 'head = "subprocess:Popen"']))
    code, output = command("predict", finished, tmp_path)
    assert code == 1
    assert "subprocess has no head 'Popen'" in output


def test_every_line_with_numbers_is_tracked(tmp_path, monkeypatch):
    logged = []

    class Tracker:
        def log(self, numbers, step):
            logged.append((step, sorted(numbers)))

        def close(self):
            logged.append("closed")

    monkeypatch.setattr("gpu_logicmix.train.runlog.open_trackers", lambda *_: [Tracker()])
    train(tmp_path / "run", cl=True, cft=True, cft_epochs=3, epochs=2)
    kinds = [name.partition("/")[0] for step, names in logged[:-1] for name in names]
    assert {"step", "epoch", "curriculum", "cft", "end"} == set(kinds)
    assert [step for step, _ in logged[:-1]] == sorted(step for step, _ in logged[:-1])
    assert logged[-1] == "closed"
