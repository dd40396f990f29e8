"""What reaches a run from outside (signals, terminals, planted and damaged files), and where it may start from."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from launch import SMALL, Command, good, run, until
from PIL import Image
from places import ROOT
from rich.console import Console
from runs import TINY, train
from safetensors.torch import load_file, save_file

from gpu_logicmix.errors import RunError
from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint, read_config
from gpu_logicmix.train.config import Config, make_config
from gpu_logicmix.train.loop import fit
from gpu_logicmix.train.predict import load_run
from gpu_logicmix.train.runlog import read_log


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def stop_after(monkeypatch, folder: Path, calls: int, **options) -> None:
    """A run that gets a signal in a certain step."""
    seen = [0]
    seed_step = loop.seed_step

    def counted(*arguments):
        seen[0] += 1
        if seen[0] == calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return seed_step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "seed_step", counted)
        with pytest.raises(loop.StopSignals.stop.__globals__["Interrupted"]):
            train(folder, **options)


# ------------------------------------------------------------------------------------------------ terminals and signals
@pytest.mark.slow
def test_a_terminal_that_closes_saves_the_run(tmp_path):
    with Command(tmp_path, *SMALL, "--epochs", 200, "--out", tmp_path / "run") as command:
        until(lambda: (tmp_path / "run" / "last.pt").exists(), what="a checkpoint")
        command.signal(signal.SIGHUP)
        assert command.wait() == 0
    assert "resume with: gpu-logicmix fit" in command.text
    steps = [line["step"] for line in read_log(tmp_path / "run") if line["kind"] == "step"]
    assert read_checkpoint(tmp_path / "run" / "last.pt")["step"] >= max(steps) - 1


def lose_stdout(how: str) -> None:
    """As in `fit | head -1` and in `fit > /dev/full`."""
    if how == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    else:
        head = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        os.dup2(head.stdin.fileno(), 1)
        head.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["head", "closed", "full"])
def test_losing_stdout_does_not_stop_a_run(tmp_path, how):
    arguments = [*SMALL, "--no-cft", "--out", str(tmp_path / "run")]
    if how == "closed":  # from the start on: Python then has no sys.stdout at all
        line = " ".join([sys.executable, str(ROOT / "train.py"), *arguments]) + " >&-"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=300)
        errors = done.stderr
    else:
        errors = run(tmp_path, *arguments, hook=(lose_stdout, how)).err
    assert "Traceback" not in errors
    assert read_log(tmp_path / "run")[-1]["kind"] == "end", errors
    assert read_checkpoint(tmp_path / "run" / "last.pt")["closed"] == 3


def test_the_epoch_is_saved_before_it_is_printed(tmp_path, monkeypatch):
    saved = []
    save = loop.Training.save
    monkeypatch.setattr(loop.Training, "save", lambda self: (save(self), saved.append(self.closed)))

    class Screen(Console):
        def print(self, *words, **options):
            for word in words:
                if str(word).startswith("epoch"):
                    assert saved[-1] == int(str(word).split("/")[0].split()[1])

    fit(make_config(TINY), tmp_path / "run", console=Screen(quiet=True))
    assert saved == [1, 2]


# ---------------------------------------------------------------------------------------------- files lost or exchanged
@pytest.mark.parametrize("lost", ["missing", "empty"])
def test_a_lost_config_is_taken_from_the_checkpoint(tmp_path, monkeypatch, finished, lost):
    folder = tmp_path / "run"
    stop_after(monkeypatch, folder, 4)
    expected = read_config(folder)
    (folder / "config.toml").unlink()
    if lost == "empty":
        (folder / "config.toml").touch()
    assert read_config(folder) == expected
    good(tmp_path, "fit", "--out", folder, "--resume")
    assert equal(weights(folder), weights(finished))


def test_best_weights_must_be_those_of_the_run(tmp_path, finished):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    state = read_checkpoint(folder / "best.pt")
    state["ema"] = {name: torch.zeros_like(value) for name, value in state["ema"].items()}
    torch.save(state, folder / "best.pt")
    (folder / "log.jsonl").write_text("")  # as if it had been killed before the end
    with pytest.raises(RunError, match=r"best\.pt: not the weights that this run wrote; with --keep last"):
        train(folder, "must")
    (folder / "best.pt").write_bytes(b"damaged")
    with pytest.raises(RunError, match="with --keep last the run ends without it"):
        train(folder, "must")
    train(folder, "must", keep="last")


def test_bytes_that_changed_in_the_weights_are_noticed(tmp_path, finished):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(64)
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"model\.safetensors: damaged \(its tensors have another checksum"):
        load_run(folder)
    tensors = load_file(finished / "model.safetensors")
    save_file(tensors, file, metadata={"categories": json.dumps({"a": 1})})
    with pytest.raises(RunError, match="its header has no list of categories"):
        load_run(folder)


def test_links_in_a_received_folder_are_not_followed(tmp_path, finished):
    for name in ("lock", "log.jsonl"):
        folder = tmp_path / name
        folder.mkdir()
        victim = tmp_path / f"victim-{name}"
        victim.write_text("mine")
        (folder / name).symlink_to(victim)
        command = run(tmp_path, *SMALL, "--out", folder)
        assert victim.read_text() == "mine"
        assert "Traceback" not in command.err


def test_a_log_of_anything_is_read(tmp_path):
    lines = ['{"kind": "epoch", "epoch": 1}', "[1, 2]", '"text"', "{}", '{"kind": 3}', "[" * 100_000, '{"kind": "end"']
    (tmp_path / "log.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    assert read_log(tmp_path) == [{"kind": "epoch", "epoch": 1}]


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    stop_after(monkeypatch, folder, 2)
    state = read_checkpoint(folder / "last.pt")
    del state["format"]
    torch.save(state, folder / "last.pt")
    with pytest.raises(RunError, match="made by an earlier version of gpu-logicmix"):
        train(folder, "must")


def test_other_weights_that_would_normalise_the_images_are_refused(tmp_path, monkeypatch):
    """With --normalisation auto it is the weights that say; those of the checkpoint would then see other images."""
    folder, file = tmp_path / "run", tmp_path / "timm.pth"
    stop_after(monkeypatch, folder, 2)
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), file)
    with pytest.raises(RunError, match=r"images normalised otherwise; give its options weights='none' and init=None"):
        train(folder, "must", weights=str(file))


def test_images_that_changed_since_are_noticed(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    rows = ["image,split,cat,dog"]
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(data / f"{i}.png")
        rows.append(f"{i}.png,{'val' if i % 4 == 0 else 'train'},{i % 2},{i % 3 == 0:d}")
    (data / "labels.csv").write_text("\n".join(rows) + "\n")
    options = {"data": f"csv:{data / 'labels.csv'}", "option": None, "known": None}
    folder = tmp_path / "run"
    stop_after(monkeypatch, folder, 2, **options)
    image = data / "1.png"
    before = image.stat()
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(image)
    with pytest.raises(RunError, match="file sizes"):
        train(folder, "must", **options)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(image)
    if image.stat().st_size == before.st_size:
        with pytest.raises(RunError, match="their dates changed"):
            train(folder, "must", **options)


def test_a_start_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="timm has no such model"):
        train(tmp_path / "run", model="resnet1010")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="timm has no such model"):
        train(tmp_path / "mine", model="resnet1010")
    assert {path.name for path in (tmp_path / "mine").iterdir()} <= {"notes.txt", "lock"}


# ---------------------------------------------------------------------------------------------- where a run starts from
def test_a_run_is_evaluated_from_any_folder(tmp_path, monkeypatch, finished):
    assert read_config(finished).data == "shapes"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "labels.csv").write_text("image,split,cat\na.png,train,1\na.png,val,1\n")
    located = loop.located(Config(data="csv:data/labels.csv", cache="cache", weights="none", val="csv:data/labels.csv"))
    assert located.data == f"csv:{tmp_path / 'data' / 'labels.csv'}" == located.val
    assert located.cache == str(tmp_path / "cache")
    assert located.weights == "none"


def test_init_starts_from_the_weights_of_a_run(tmp_path, finished):
    with_init = loop.Training(replace(make_config(TINY), init=str(finished)), tmp_path, world(), lambda text: None)
    expected = weights(finished)
    state = with_init.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    with pytest.raises(RunError, match="not a finished run"):
        loop.Training(replace(make_config(TINY), init=str(tmp_path)), tmp_path, world(), lambda text: None)


def world():
    from gpu_logicmix.train.distributed import World

    return World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("options", [{"bank": 16}, {"partners": "with-replacement"}, {"mix_unknown": "absent"}])
def test_options_of_logicmix_resume_exactly(tmp_path, monkeypatch, finished, options):
    train(tmp_path / "whole", **options)
    assert not equal(weights(tmp_path / "whole"), weights(finished))
    stop_after(monkeypatch, tmp_path / "stopped", 5, **options)
    train(tmp_path / "stopped", "must", **options)
    assert equal(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


def test_the_authors_schedule_runs_a_quarter_of_the_cycle(tmp_path):
    """Their released code: 1cycle for one step a batch, stepped once in 4 batches. The rate rises until 80 % of the run
    (epoch 48 of 60) and ends at 99 % of its peak."""
    config = make_config(TINY | {"schedule": "authors", "accumulate": 4, "epochs": 60, "option": ["count=320"]})
    run = loop.Training(config, tmp_path, world(), lambda text: None)
    oracle = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
    cycle = torch.optim.lr_scheduler.OneCycleLR(oracle, config.lr, epochs=60, steps_per_epoch=40, pct_start=0.2)
    rates = []
    for _ in range(60 * 10):
        assert run.optimizer.param_groups[-1]["lr"] == pytest.approx(oracle.param_groups[0]["lr"], rel=1e-9)
        rates.append(run.optimizer.param_groups[-1]["lr"])
        run.optimizer.step()
        run.scheduler.step()
        oracle.step()
        cycle.step()
    assert rates.index(max(rates)) == pytest.approx(0.8 * 600, abs=2)
    assert rates[-1] / max(rates) == pytest.approx(0.9904, abs=2e-3)


def test_two_views_are_mixed_by_one_plan():
    from gpu_logicmix.train.batch import Augment

    config = make_config(TINY | {"p": 1.0, "flip": False})
    augment = Augment(config, views=2)
    augment.randaugment = torch.nn.Identity()
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    (weak, strong), _, mixed = augment(images, torch.ones(8, 3, dtype=torch.int8))
    assert mixed.all()
    assert torch.equal(weak, strong)
    assert not torch.equal(weak, images.float() / 255)
    with pytest.raises(ValueError, match="two views"):
        Augment(replace(config, bank=4), views=2)


def test_the_best_epoch_by_held_out_images_reports_validation_figures(tmp_path):
    end = train(tmp_path / "run", tune_images=8, epochs=3)
    epochs = [line for line in read_log(tmp_path / "run") if line["kind"] == "epoch"]
    assert end["mAP_best"] == max(line["mAP"] for line in epochs)
    chosen = max(epochs, key=lambda line: line["tune_mAP"])
    assert end["epoch"] == chosen["epoch"]
    assert end["mAP"] == pytest.approx(chosen["mAP"])


def test_best_weights_in_place_of_a_checkpoint_are_refused_in_one_line(tmp_path, finished):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.copy(folder / "best.pt", folder / "last.pt")
    with pytest.raises(RunError, match=r"its last\.pt is not a checkpoint to resume from"):
        train(folder, "must")
    (folder / "config.toml").unlink()
    with pytest.raises(RunError, match=r"its last\.pt is not a checkpoint to resume from"):
        read_config(folder)
