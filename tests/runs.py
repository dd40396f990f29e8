"""Small runs for tests: started, stopped at a chosen moment, compared with one another."""

import os
import signal
from pathlib import Path

import numpy as np
import torch
from launch import SMALL
from oracles import same
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from gpu_logicmix import cli
from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import make_config
from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.runlog import read_log

TIMES = {"images_per_second", "waiting", "seconds", "waited", "elapsed", "memory", "config"}
ALWAYS = ("--save-every", "1e-9")  # a checkpoint after each update
# A run of a second, on drawn shapes.
TINY = {"option": ["count=24"], "size": 32, "known": 0.5, "model": "test_resnet", "weights": "none", "head": "linear"}
TINY |= {"batch_size": 8, "accumulate": 1, "epochs": 2, "workers": 0, "threads": 1, "cl": False, "cft": False}


def train(folder: Path, resume: str = "never", **options) -> dict:
    """A tiny run in this process. Returns the last line of its log."""
    return loop.fit(make_config(TINY | options), folder, resume=resume, console=Console(quiet=True))


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def log_of(folder: Path) -> list[dict]:
    return [without_times(line) for line in read_log(folder) if line["kind"] != "start"]


def assert_same_run(folder: Path, reference: Path) -> None:
    """All that a run leaves behind is the same, but for how long it took."""
    for name in ("model.safetensors", "cft.safetensors"):
        assert same(load_file(folder / name), load_file(reference / name)), name
    state, expected = (without_times(read_checkpoint(place / "last.pt")) for place in (folder, reference))
    for key in expected:
        assert same(state[key], expected[key]), key
    best, expected = (read_checkpoint(place / "best.pt") for place in (folder, reference))
    assert same(best, expected)
    assert log_of(folder) == log_of(reference)
    for name in ("predictions.npz", "cft_predictions.npz"):
        with np.load(folder / name) as arrays, np.load(reference / name) as expected:
            assert all(np.array_equal(arrays[key], expected[key]) for key in expected.files), name
    assert len((folder / "epochs.csv").read_text().splitlines()) == 4


def steps_in(folder: Path) -> int:
    return max((line["step"] for line in read_log(folder) if line["kind"] == "step"), default=0)


def here(*arguments) -> tuple[int, str]:
    """In this process, where parts can be replaced. Exit code and output."""
    result = CliRunner().invoke(cli.app, cli._with_value(list(map(str, arguments))), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, f"{result.output}error: {result.exception}"
    return result.exit_code, result.output


def at_call(monkeypatch, owner, name: str, number: int, do) -> None:
    """`do(*arguments)` before call number `number` of a function."""
    function, calls = getattr(owner, name), [0]

    def wrapper(*arguments, **options):
        calls[0] += 1
        if calls[0] == number:
            do(*arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, wrapper)


def stopped(monkeypatch, folder: Path, owner, name: str, number: int, signum: int = signal.SIGTERM, *extra):
    """The small run, with a signal at a certain moment."""
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, number, lambda *_: os.kill(os.getpid(), signum))
        return here(*SMALL, "--out", folder, *extra)


def a_run(tmp_path: Path, **options) -> loop.Training:
    """In this process, ready to be stepped through."""
    config = make_config(
        {
            "data": "shapes", "option": ["count=40"], "size": 32, "known": 0.5, "model": "test_resnet",
            "weights": "none", "head": "linear", "batch_size": 8, "accumulate": 1, "workers": 0, **options,
        }
    )  # fmt: skip
    torch.set_num_threads(1)
    return loop.Training(config, tmp_path, World(0, 1, torch.device("cpu")), lambda text: None)


def step_through(run: loop.Training, steps: int) -> None:
    run.model.train()
    while steps:
        epoch, start = divmod(run.step, run.steps)
        run.loader.sampler.set_epoch(epoch, start)
        for batch in run.loader:
            run.batch(*batch, update=(run.step + 1) % run.config.accumulate == 0)
            steps -= 1
            if not steps:
                return


def largest_difference(a: dict, b: dict) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)
