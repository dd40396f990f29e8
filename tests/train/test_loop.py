"""loop.py: runs that are killed, stopped, damaged, short of disk; one process against two; and its arithmetic."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import PLAIN, SMALL, Command, good, ranks, run, until
from oracles import same
from PIL import Image
from places import ROOT
from rich.console import Console
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from gpu_logicmix import cli
from gpu_logicmix.train import finetune, finish, loop, predict
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import make_config
from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.runlog import Log, read_log
from gpu_logicmix.train.signals import Interrupted, StopSignals
from gpu_logicmix.train.sums import check_finite

TIMES = {"images_per_second", "waiting", "seconds", "waited", "elapsed", "memory", "config"}
ALWAYS = ("--save-every", "1e-9")  # a checkpoint after each update


# -------------------------------------------------------------------------------------------------------------- oracles
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The small run, uninterrupted and with a checkpoint after each epoch alone."""
    folder = tmp_path_factory.mktemp("reference")
    good(folder, *SMALL, "--out", folder / "run")
    return folder / "run"


@pytest.fixture(autouse=True)
def _threads_of_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def here(*arguments) -> tuple[int, str]:
    """In this process, where parts can be replaced. Exit code and output."""
    result = CliRunner().invoke(cli.app, cli._with_value(list(map(str, arguments))), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, f"{result.output}error: {result.exception}"
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr("gpu_logicmix.cli.runs.write_report", lambda folder: None)


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


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """The small run, stopped in its second epoch: last.pt is at step 9, previous.pt at 7."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_logicmix.cli.runs.write_report", lambda folder: None)
        code, text = stopped(patch, folder, loop, "seed_step", 8, signal.SIGTERM, *ALWAYS)
    assert code == 0, text
    assert read_checkpoint(folder / "last.pt")["step"] == 9
    assert read_checkpoint(folder / "previous.pt")["step"] == 7
    return folder


@pytest.fixture
def copied(half, tmp_path) -> Path:
    """A copy of the half run, to be spoilt."""
    return Path(shutil.copytree(half, tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------------- killed ...
def test_killed_ten_times_at_random_moments(tmp_path, reference):
    folder, chance = tmp_path / "run", random.Random()
    last = steps_in(reference)
    kills = 0
    for step in sorted(chance.randint(0, last - 2) for _ in range(10)):
        with Command(tmp_path, *SMALL, *ALWAYS, "--out", folder, "--resume", "auto") as command:
            while steps_in(folder) < step and command.process.exitcode is None:
                command.process.join(0.005)
            command.process.join(chance.uniform(0, 0.2))
            kills += command.process.exitcode is None
            command.process.kill()
            command.process.join()
            assert command.process.exitcode in (0, -signal.SIGKILL), command.text
    assert kills >= 8  # the run may have been quicker than the last ones
    good(tmp_path, *SMALL, *ALWAYS, "--out", folder, "--resume", "auto")
    assert_same_run(folder, reference)
    again = good(tmp_path, *SMALL, "--out", folder, "--resume", "auto")
    assert "this run has ended" in again.text


def test_goes_on_at_once_after_a_kill_with_workers(tmp_path, reference):
    """Workers outlive their main process for seconds: they must not hold the lock of the folder."""
    folder = tmp_path / "run"
    with Command(tmp_path, *SMALL, *ALWAYS, "--out", folder, "--workers", 2) as command:
        until(lambda: steps_in(folder) >= 3)
        command.process.kill()
        command.process.join()
    good(tmp_path, "fit", "--out", folder, "--resume", "--workers", 0)
    assert_same_run(folder, reference)


# ---------------------------------------------------------------------------------------------------------- stopped ...
@pytest.mark.parametrize(
    ("owner", "name", "number", "signum", "words"),
    [
        (loop, "open_val", 1, signal.SIGINT, "stopped before the first checkpoint"),
        (loop, "open_val", 1, signal.SIGTERM, "stopped before the first checkpoint"),
        (loop, "seed_step", 3, signal.SIGINT, "stopped at step 4; resume with"),
        (loop, "seed_step", 8, signal.SIGTERM, "stopped at step 9; resume with"),
        (predict, "predict_rows", 1, signal.SIGINT, "stopped at step 5; resume with"),
        (predict, "predict_rows", 2, signal.SIGTERM, "stopped at step 10; resume with"),
        (loop.Training, "_label", 2, signal.SIGINT, "stopped at step 10; resume with"),
        (loop, "write_checkpoint", 1, signal.SIGTERM, "stopped after epoch 1; resume with"),
        (finish, "write_model", 1, signal.SIGINT, "stopped; resume with"),
        (finetune, "category_wise_fine_tune", 1, signal.SIGTERM, "stopped; resume with"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else None,
)
def test_stopped_and_resumed(tmp_path, monkeypatch, reference, owner, name, number, signum, words):
    folder = tmp_path / "run"
    code, text = stopped(monkeypatch, folder, owner, name, number, signum)
    assert code == (130 if signum == signal.SIGINT else 0), text
    assert words in text
    assert "Traceback" not in text
    if "resume" in words:
        assert f"gpu-logicmix fit --out {folder} --resume" in " ".join(text.split())
        code, text = here("fit", "--out", folder, "--resume")
    else:
        code, text = here(*SMALL, "--out", folder)
    assert code == 0, text
    assert_same_run(folder, reference)


def test_a_second_signal_is_not_waited_for(tmp_path, monkeypatch):
    def twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_call(monkeypatch, loop, "seed_step", 3, twice)
    code, text = here(*SMALL, "--out", tmp_path / "run")
    assert code == 130
    assert "stopped before the first checkpoint" in text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # all is as it was before


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signal_to_the_whole_group_spares_the_workers(tmp_path, reference, signum, code):
    """Ctrl-C at a terminal reaches the workers too, and so does torchrun's SIGTERM."""
    folder = tmp_path / "run"
    with Command(tmp_path, *SMALL, "--out", folder, "--workers", 2) as command:
        until(lambda: steps_in(folder) >= 1)
        command.signal(signum, group=True)
        assert command.wait() == code, command.text
    assert "stopped at step" in command.out
    assert command.err == ""
    good(tmp_path, "fit", "--out", folder, "--resume", "--workers", 0)
    assert_same_run(folder, reference)


# ---------------------------------------------------------------------------------------------------------- damaged ...
def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    """One bit, in the middle of the weights."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("no checkpoint")


@pytest.mark.parametrize("damage", [truncate, flip, empty, text])
def test_damaged_checkpoint_falls_back_to_the_one_before(copied, tmp_path, reference, damage):
    damage(copied / "last.pt")
    command = good(tmp_path, "fit", "--out", copied, "--resume")
    assert f"warning: {copied}/last.pt: damaged" in command.out
    assert "previous.pt, step 7" in command.out
    assert_same_run(copied, reference)


def test_both_checkpoints_damaged(copied, tmp_path):
    flip(copied / "last.pt")
    truncate(copied / "previous.pt")
    command = run(tmp_path, "fit", "--out", copied, "--resume")
    assert command.process.exitcode == 1
    assert command.err.startswith(f"error: {copied}/last.pt: damaged")
    assert command.err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------- full disk and NaN
def test_disk_full_while_saving(copied, tmp_path, reference):
    before = (copied / "last.pt").read_bytes()
    command = run(tmp_path, "fit", "--out", copied, "--resume", *ALWAYS, limit=len(before) // 2)
    assert command.process.exitcode == 1
    assert command.err.startswith(f"error: {copied}/next.pt: cannot be written (File too large)")
    assert command.err.count("\n") == 1
    assert (copied / "last.pt").read_bytes() == before
    good(tmp_path, "fit", "--out", copied, "--resume")
    assert_same_run(copied, reference)


def test_a_really_full_disk(tmp_path, reference):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9M", "tmpfs", disk]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        command = run(tmp_path, *SMALL, *ALWAYS, "--out", disk / "run")  # a checkpoint has 6 MB
        assert command.process.exitcode == 1
        assert command.err.startswith(f"error: {disk}/run/next.pt: cannot be written (No space left on device)")
        assert command.err.count("\n") == 1
        folder = Path(shutil.copytree(disk / "run", tmp_path / "run"))
    finally:
        subprocess.run(["umount", disk], check=True)
    good(tmp_path, "fit", "--out", folder, "--resume")
    assert_same_run(folder, reference)


def test_loss_that_is_no_number(tmp_path):
    command = run(tmp_path, *SMALL, "--out", tmp_path / "run", "--lr", "1e30", "--schedule", "constant")
    assert command.process.exitcode == 1
    assert "the loss became non-finite at step 3 (epoch 1)" in command.err
    assert "there is no checkpoint yet" in command.err
    assert command.err.count("\n") == 1


def poison(run: loop.Training) -> None:
    with torch.no_grad():
        run.model.classifier.weight[0, 0] = float("nan")


def test_nan_stops_the_run_before_it_is_saved(copied, monkeypatch, reference):
    with monkeypatch.context() as patch:
        found = []
        at_call(patch, loop.Training, "batch", 1, lambda run, *_: found.append(run))
        at_call(patch, loop, "seed_step", 3, lambda *_: poison(found[0]))
        code, text = here("fit", "--out", copied, "--resume", "--log-every", "100")
    assert code == 1
    assert "the loss became non-finite at step 12 (epoch 3); the last checkpoint" in text
    assert read_checkpoint(copied / "last.pt")["step"] == 10  # the end of the epoch before
    assert here("fit", "--out", copied, "--resume", "--log-every", "1")[0] == 0
    lines = [line["step"] for line in log_of(copied) if line["kind"] == "step"]
    assert lines == sorted(set(lines))
    assert same(load_file(copied / "cft.safetensors"), load_file(reference / "cft.safetensors"))


@pytest.mark.parametrize("step", [12, 15])
def test_update_that_spoils_the_weights_is_not_saved(copied, monkeypatch, step):
    """The loss was still a number. At step 15, the last one, no other loss would tell."""
    update = loop.Training._update

    def spoil(run):
        update(run)
        if run.step == step:
            poison(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_update", spoil)
        code, text = here("fit", "--out", copied, "--resume", *ALWAYS)
    assert code == 1
    assert f"became non-finite at step {step} (epoch 3)" in text
    state = read_checkpoint(copied / "last.pt")
    assert state["step"] < step
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


# -------------------------------------------------------------------------------------------------------- two processes
def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "last.pt")["model"]


def largest_difference(a: dict, b: dict) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """20 steps of one process with a batch of 8, each an update."""
    folder = tmp_path_factory.mktemp("alone")
    good(folder, *PLAIN, "-o", "count=80", "--out", folder / "run", "--accumulate", 1)
    assert read_checkpoint(folder / "run" / "last.pt")["updates"] == 20
    return folder / "run"


def test_the_runs_that_are_compared_do_learn(alone, tmp_path):
    good(tmp_path, *PLAIN, "-o", "count=80", "--out", tmp_path / "run", "--accumulate", 1, "--lr", 1e-9)
    assert largest_difference(weights(tmp_path / "run"), weights(alone)) > 1e-3


def test_two_processes_are_one_with_the_doubled_batch(alone, tmp_path):
    for command in ranks(
        tmp_path, 2, *PLAIN, "-o", "count=80", "--batch-size", 4, "--accumulate", 1, "--out", tmp_path / "run"
    ):
        assert command.process.exitcode == 0, command.text
    assert largest_difference(weights(tmp_path / "run"), weights(alone)) < 1e-5
    for line, expected in zip(log_of(tmp_path / "run"), log_of(alone), strict=True):
        assert line.keys() == expected.keys()
        for key, value in expected.items():
            assert line[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


def test_two_processes_accumulate_as_one(tmp_path):
    """10 steps an epoch, 4 to an update: the last update of an epoch has but two."""
    good(tmp_path, *PLAIN, "-o", "count=80", "--accumulate", 4, "--out", tmp_path / "one")
    arguments = (*PLAIN, "-o", "count=80", "--batch-size", 4, "--accumulate", 4, "--out", tmp_path / "two")
    for command in ranks(tmp_path, 2, *arguments):
        assert command.process.exitcode == 0, command.text
    assert read_checkpoint(tmp_path / "two" / "last.pt")["updates"] == 6
    assert largest_difference(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-5


def test_accumulated_batches_are_one_batch(alone, tmp_path):
    good(tmp_path, *PLAIN, "-o", "count=80", "--batch-size", 2, "--accumulate", 4, "--out", tmp_path / "run")
    assert largest_difference(weights(tmp_path / "run"), weights(alone)) < 1e-5


@pytest.mark.parametrize("count", [37, 1])
def test_two_processes_evaluate_as_one(alone, tmp_path, count):
    """37 images do not divide; of 1 image the second process gets none."""
    folder = Path(shutil.copytree(alone, tmp_path / "run"))
    toml = (folder / "config.toml").read_text()
    assert '"count=80"]' in toml
    (folder / "config.toml").write_text(toml.replace('"count=80"]', f'"count={count}"]'))
    arguments = ("evaluate", folder, "--batch-size", 4, "--threads", 1, "--out")
    good(tmp_path, *arguments, tmp_path / "one.json")
    for command in ranks(tmp_path, 2, *arguments, tmp_path / "two.json"):
        assert command.process.exitcode == 0, command.text
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    # Batches of another make-up: the last bit of a logit may differ, which ECE sees.
    assert {k: v for k, v in one.items() if not isinstance(v, float)} == {
        k: v for k, v in two.items() if not isinstance(v, float)
    }
    assert {k: v for k, v in one.items() if isinstance(v, float)} == pytest.approx(
        {k: v for k, v in two.items() if isinstance(v, float)}, abs=1e-7, nan_ok=True
    )
    assert one["images"] == count


def record(folder: Path) -> None:
    """Note what a rank draws, labels, and writes to."""
    import gpu_logicmix

    rank = os.environ["RANK"]
    plan, update = gpu_logicmix.GPULogicMix.plan, gpu_logicmix.CurriculumLabels.update

    def note(kind, values):
        os.write(notes, (json.dumps([kind, values]) + "\n").encode())

    def noted_plan(self, *arguments):
        drawn = plan(self, *arguments)
        note("plan", drawn.index.tolist())
        return drawn

    def noted_update(self, index, logits):
        note("label", index.tolist())
        return update(self, index, logits)

    def audit(event, arguments):
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and str(folder / "run") in str(arguments[0]):
            note("write", str(arguments[0]))
        if event in ("os.rename", "os.remove", "os.mkdir") and str(folder / "run") in str(arguments[0]):
            note("write", str(arguments[0]))

    notes = os.open(folder / f"notes-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    gpu_logicmix.GPULogicMix.plan = noted_plan
    gpu_logicmix.CurriculumLabels.update = noted_update
    sys.addaudithook(audit)


def test_what_each_of_two_processes_does(tmp_path):
    arguments = (*SMALL, "-o", "count=37", "--batch-size", 4, "--epochs", 2, "--out", tmp_path / "run")
    for command in ranks(tmp_path, 2, *arguments, hook=(record, tmp_path)):
        assert command.process.exitcode == 0, command.text
    notes = [[json.loads(line) for line in (tmp_path / f"notes-{r}").read_text().splitlines()] for r in range(2)]
    first, second = ({kind: [v for k, v in rank if k == kind] for kind in ("plan", "label", "write")} for rank in notes)
    # Each sample is labeled exactly once, by one of the two.
    assert sorted(i for indices in first["label"] + second["label"] for i in indices) == list(range(37))
    assert all(len(indices) <= 4 for indices in first["label"] + second["label"])
    # The first one writes, the other does not.
    assert first["write"]
    assert not second["write"]
    # Random streams of their own.
    assert len(first["plan"]) == len(second["plan"]) == 8
    assert all(a != b for a, b in zip(first["plan"], second["plan"], strict=True))
    # The table is the one that the model at the end of the first epoch gives.
    state = read_checkpoint(tmp_path / "run" / "last.pt")
    counts = next(line for line in log_of(tmp_path / "run") if line["kind"] == "curriculum")
    table, known = state["curriculum"]["table"], state["curriculum"]["known"]
    assert (table[known != -1] == known[known != -1]).all()
    assert ((table == 1) & (known == -1)).sum() == counts["positives"]
    assert ((table == 0) & (known == -1)).sum() == counts["negatives"] > 0


def test_two_processes_make_the_pseudo_labels_of_one(tmp_path):
    arguments = (*PLAIN, "-o", "count=37", "--accumulate", 1, "--theta-pos", "0.05", "--theta-neg", "-0.05")
    good(tmp_path, *arguments, "--out", tmp_path / "one")
    for command in ranks(tmp_path, 2, *arguments, "--batch-size", 4, "--out", tmp_path / "two"):
        assert command.process.exitcode == 0, command.text
    one, two = (read_checkpoint(tmp_path / name / "last.pt")["curriculum"] for name in ("one", "two"))
    assert (one["table"] != one["known"]).sum() > 50
    assert same(one, two)


@pytest.mark.parametrize("processes", [(1, 2), (2, 1)])
def test_resumes_with_another_number_of_processes(tmp_path, processes):
    """A rank that is lost and not replaced: the run goes on from the nearest place, and says so."""
    before, after = processes
    folder, arguments = tmp_path / "run", (*SMALL, "--save-every", "0.000001", "--batch-size", 4)
    hook = (stop_in_step, 7)
    if before > 1:
        ranks(tmp_path, before, *arguments, "--out", folder, hook=hook)
    else:
        run(tmp_path, *arguments, "--out", folder, hook=hook)
    state = read_checkpoint(folder / "last.pt")
    assert (state["processes"], state["closed"]) == (before, 0 if before == 1 else 1)
    if after > 1:
        commands = ranks(tmp_path, after, "fit", "--out", folder, "--resume")
    else:
        commands = [good(tmp_path, "fit", "--out", folder, "--resume")]
    for command in commands:
        assert command.process.exitcode == 0, command.text
    assert f"resuming with {after} processes in place of {before}" in commands[0].text
    done = read_checkpoint(folder / "last.pt")
    assert done["closed"] == 3
    assert done["step"] == 3 * done["steps"] == 3 * (40 // (4 * after))
    assert done["updates"] == 3 * -(-done["steps"] // 2) == done["scheduler"]["last_epoch"]


def stop_in_step(number: int) -> None:
    """SIGTERM to this process in its step with that number."""
    from gpu_logicmix.train import loop

    seed_step, count = loop.seed_step, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return seed_step(*arguments)

    loop.seed_step = counted


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_one_of_two_processes_is_told_to_stop(tmp_path, signum):
    """They agree on a step, save there, and go on from there."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--batch-size", 4, "--out", folder)
    for command in ranks(tmp_path, 2, *arguments, hook=(stop_rank_one, signum)):
        assert command.process.exitcode == (130 if signum == signal.SIGINT else 0), command.text
    assert read_checkpoint(folder / "last.pt")["step"] == 4
    for command in ranks(tmp_path, 2, *arguments, "--resume", "auto"):
        assert command.process.exitcode == 0, command.text
    for command in ranks(tmp_path, 2, *SMALL, "--batch-size", 4, "--out", tmp_path / "whole"):
        assert command.process.exitcode == 0, command.text
    assert_same_run(folder, tmp_path / "whole")


def stop_rank_one(signum: int) -> None:
    if os.environ["RANK"] == "1":
        patch = pytest.MonkeyPatch()
        at_call(patch, loop, "seed_step", 3, lambda *_: os.kill(os.getpid(), signum))


def test_rank_that_is_killed_under_torchrun_comes_back(tmp_path):
    folder = tmp_path / "run"
    arguments = [*SMALL, *ALWAYS, "--batch-size", "4", "--out", str(folder)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(ROOT / "train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (
        open(tmp_path / "output", "w") as output,
        subprocess.Popen(
            [*launcher, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as torchrun,
    ):
        try:
            until(lambda: steps_in(folder) >= 3 or torchrun.poll() is not None, 240)
            os.kill(rank_process(torchrun.pid, 1), signal.SIGKILL)
            code = torchrun.wait(300)
        finally:
            torchrun.terminate()
    assert code == 0, (tmp_path / "output").read_text()[-3000:]
    assert [line["kind"] for line in read_log(folder)].count("start") == 2
    assert read_log(folder)[-1]["kind"] == "end"
    for command in ranks(tmp_path, 2, *SMALL, "--batch-size", 4, "--out", tmp_path / "whole"):
        assert command.process.exitcode == 0, command.text
    assert_same_run(folder, tmp_path / "whole")


def rank_process(torchrun: int, rank: int) -> int:
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and f"\0RANK={rank}\0" in f"\0{(place / 'environ').read_text()}\0":
                return int(place.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank} below process {torchrun}")


# ------------------------------------------------------------------------------------------------------- its arithmetic
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


@pytest.mark.parametrize("warmup", [True, False])
def test_moving_average_is_timms_formula(tmp_path, warmup):
    run = a_run(tmp_path, ema_decay=0.9, ema_warmup=warmup, accumulate=2, lr=0.01, schedule="constant")
    average = {k: v.double().clone() for k, v in run.model.state_dict().items() if v.is_floating_point()}
    for update in range(1, 9):
        step_through(run, 2)  # two batches are one update, and one step of the average
        # The first one is a copy.
        decay = 0 if update == 1 else min(0.9, 1 - update ** (-2 / 3)) if warmup else 0.9
        for name, value in run.model.state_dict().items():
            if name in average:
                average[name].lerp_(value.double(), 1 - decay)
    assert run.updates == 8
    for name, value in average.items():
        torch.testing.assert_close(run.shown.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)


def test_no_moving_average(tmp_path):
    run = a_run(tmp_path, ema_decay=0.0)
    assert run.shown is run.model
    good(tmp_path, *SMALL, "--epochs", 1, "--ema-decay", 0, "--out", tmp_path / "run")
    assert read_checkpoint(tmp_path / "run" / "last.pt")["ema"] is None


@pytest.mark.parametrize(("epochs", "accumulate"), [(1, 5), (1, 1), (3, 2), (4, 5), (9, 5)])
def test_rate_rises_to_its_peak_and_falls_to_nothing(tmp_path, epochs, accumulate):
    """Also in runs of few updates: 1, 5, 9, 4 and 9."""
    run = a_run(tmp_path, epochs=epochs, accumulate=accumulate, lr=0.1, backbone_lr=0.01)
    rates = []
    update = run._update

    def noted():
        rates.append([group["lr"] for group in run.optimizer.param_groups])
        update()

    run._update = noted
    log = Log(tmp_path, False, False)
    for _ in range(epochs):
        run.train_epoch(log, lambda images: None, StopSignals(tmp_path))
    assert len(rates) == epochs * -(-5 // accumulate) == run.updates
    head = [rate[-1] for rate in rates]
    peak = head.index(max(head))
    assert head[: peak + 1] == sorted(head[: peak + 1])
    assert head[peak:] == sorted(head[peak:], reverse=True)
    if len(rates) > 4:
        assert head[0] < 0.05
        assert max(head) > 0.09
    assert [group["lr"] for group in run.optimizer.param_groups][-1] <= (0.1 / 25 / 1e4) * (
        1.001 if len(rates) > 1 else 1e6
    )
    assert all(rate[0] == pytest.approx(rate[-1] / 10) for rate in rates)


def test_decay_is_not_on_biases_and_norms(tmp_path):
    run = a_run(tmp_path, weight_decay=0.5)
    for group in run.optimizer.param_groups:
        assert group["weight_decay"] == (0.0 if all(p.ndim < 2 for p in group["params"]) else 0.5)


def test_short_last_batch_is_dropped_unless_it_is_all_there_is(tmp_path):
    run = a_run(tmp_path, option=["count=21"])
    assert run.steps == 2
    seen = torch.cat([index for _, _, index in run.loader])
    assert len(seen.unique()) == 16
    run = a_run(tmp_path, option=["count=5"], epochs=2)
    assert run.steps == 1
    step_through(run, 2)
    assert run.sums.first_bad == -1


@pytest.mark.parametrize("model", ["test_resnet", "test_vit"])
def test_one_image(tmp_path, model):
    """Batch norm cannot do with one; the run can."""
    good(tmp_path, *SMALL, "-o", "count=1", "--model", model, "--known", 1, "--seed", 1, "--out", tmp_path / "run")
    assert read_log(tmp_path / "run")[-1]["kind"] == "end"


@pytest.mark.parametrize("assume", [True, False])
def test_batch_that_cannot_be_read_teaches_nothing(tmp_path, assume):
    """An update in which one batch is empty is the update without it."""
    runs = [
        a_run(tmp_path, model="test_vit", loss_option=[f"assume_negative={assume}"], mix="none", lr=0.01)
        for _ in range(2)
    ]
    images, targets, index = next(iter(runs[0].loader))
    nothing = images[:0], targets[:0], index[:0]
    for training in runs:
        training.model.train()
        if training is runs[0]:
            training.batch(*nothing, update=False)
        training.step = 1
        training.batch(images, targets, index, update=True)
    assert same(*(training.model.state_dict() for training in runs))
    assert runs[0].sums.totals.tolist() == runs[1].sums.totals.tolist()


def test_images_that_cannot_be_read_are_left_out(tmp_path):
    """A whole batch of them, and one of which a single image is left."""
    (tmp_path / "img").mkdir()
    lines = ["image,split,cat,dog"]
    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    for i in range(12):
        lines += [f"img/{i}.png,{'train' if i < 8 else 'val'},{i % 2},{i // 2 % 2}"]
        if i in (1, 2, 3, 4, 5, 7, 9):
            (tmp_path / "img" / f"{i}.png").write_bytes(b"broken")
        else:
            Image.fromarray(pixels[i]).save(tmp_path / "img" / f"{i}.png")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    arguments = ["fit", f"csv:{tmp_path / 'labels.csv'}", *SMALL[SMALL.index("--model") :], "--size", 32]
    arguments += ["--batch-size", 2, "--on-bad-image", "skip", "--epochs", 4]
    for workers in (0, 1):
        folder = tmp_path / f"run-{workers}"
        good(tmp_path, *arguments, "--workers", workers, "--out", folder)
        lines = read_log(folder)
        assert [line["loss"] for line in lines if line["kind"] == "epoch"].count(None) == 0
        with np.load(folder / "predictions.npz") as saved:
            assert saved["index"].tolist() == [0, 2, 3]
    for line in (log_of(tmp_path / "run-0"), log_of(tmp_path / "run-1")):
        assert line == log_of(tmp_path / "run-0")


def test_validation_now_and_then_and_the_last_weights(tmp_path):
    good(tmp_path, *SMALL, "--eval-every", 2, "--keep", "last", "--out", tmp_path / "run")
    epochs = [line for line in read_log(tmp_path / "run") if line["kind"] == "epoch"]
    assert ["mAP" in line for line in epochs] == [False, True, True]
    state = read_checkpoint(tmp_path / "run" / "last.pt")
    assert same(load_file(tmp_path / "run" / "model.safetensors"), dict(state["ema"]))
    assert read_log(tmp_path / "run")[-1]["epoch"] == 3
    assert state["best_epoch"] == max((line for line in epochs if "mAP" in line), key=lambda line: line["mAP"])["epoch"]


def test_best_weights_are_those_of_the_best_epoch(reference):
    epochs = [line for line in log_of(reference) if line["kind"] == "epoch"]
    end = log_of(reference)[-1]
    assert end["epoch"] == max(epochs, key=lambda line: line["mAP"])["epoch"]
    assert end["mAP"] == end["mAP_best"] == max(line["mAP"] for line in epochs)
    assert same(load_file(reference / "model.safetensors"), dict(read_checkpoint(reference / "best.pt")["ema"]))


def test_other_ways_to_run(tmp_path):
    """A cache and mixed precision; with the cache the weights are the same, bit for bit."""
    short = (*SMALL, "--epochs", 1, "--no-cft")
    good(tmp_path, *short, "--out", tmp_path / "plain")
    good(tmp_path, *short, "--out", tmp_path / "cached", "--cache", tmp_path / "cache")
    good(tmp_path, *short, "--out", tmp_path / "bf16", "--amp", "bf16")
    plain, cached, bf16 = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "cached", "bf16"))
    assert same(plain, cached)
    assert 0 < largest_difference(plain, bf16) < 0.1


@pytest.mark.parametrize("loss", ["asl", "bce", "focal", "dp-asl"])
@pytest.mark.parametrize("mix", ["logicmix", "mixup", "ormixup", "mlmixup", "mixup-pme", "none"])
def test_every_mix_with_every_loss(tmp_path, mix, loss):
    run = a_run(tmp_path, mix=mix, loss=loss, option=["count=16"], lr=0.01)
    before = run.model.classifier.weight.clone()
    for epoch in range(2):
        run.augment.set_epoch(epoch)
        step_through(run, 2)
    check_finite(run, weights=True)
    assert not torch.equal(before, run.model.classifier.weight)


# --------------------------------------------------------------------------------------------- no wait for the device
class NoWait(TorchDispatchMode):
    """Fails when the host asks for a value of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "equal.", "unique")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Seems like")
@pytest.mark.parametrize("mix", ["logicmix", "none"])
def test_host_asks_for_nothing_between_logging_points(tmp_path, mix):
    """Forward, backward, loss, counts, scheduler and average, over 20 steps. The optimiser is left out: on the CPU it
    keeps its number of steps in tensors, which it reads."""
    run = a_run(tmp_path, mix=mix, accumulate=2, loss="dp-asl")
    with NoWait(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        check_finite(run)
    for index in range(20):
        batch = run.train_set[list(range(index, index + 8))]
        with NoWait(), patched(run.optimizer, "step", lambda *_: None):
            run.batch(*batch, update=index % 2 == 1)
    assert run.updates == 10


@contextlib.contextmanager
def patched(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("loss", ["asl", "dp-asl"])
@pytest.mark.parametrize("mix", ["logicmix", "mixup", "ormixup", "mlmixup", "mixup-pme", "none"])
def test_a_step_on_fake_cuda(tmp_path, monkeypatch, mix, loss):
    """A fake CUDA tensor has no value to wait for, and a tensor in the wrong place raises. Autograd does not run there
    without a device: the gradients are put in by hand."""
    run = a_run(tmp_path, mix=mix, loss=loss)
    drawn = run.augment.randaugment.plan(8)  # on the host, where it is read
    run.augment.randaugment.plan = lambda *_: drawn
    index = torch.arange(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in (*run.model.modules(), *run.ema.module.modules(), *run.table.modules()):
            for name, value in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty_like(value, device="cuda"), value.requires_grad))
            for name, value in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(value, device="cuda")
        run.world = World(0, 1, torch.device("cuda"))
        run.params = [p for p in run.model.parameters() if p.requires_grad]
        run.optimizer = torch.optim.AdamW(run.model.param_groups(1e-3), fused=True)
        run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda update: 1.0)
        for name in ("totals", "counted", "first_bad"):
            setattr(run.sums, name, getattr(run.sums, name).to("cuda"))
        for p in run.params:
            p.grad = torch.empty_like(p)
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
        monkeypatch.setattr(run.optimizer, "zero_grad", lambda: None)
        images = torch.empty(8, 3, 32, 32, dtype=torch.uint8, device="cuda").to(memory_format=torch.channels_last)
        targets = torch.empty(8, 12, dtype=torch.int8, device="cuda")
        run.model.train()
        for step in range(4):
            run.batch(images, targets, index, update=step % 2 == 1)
        assert run.updates == 2
        assert {p.device.type for p in run.ema.module.parameters()} == {"cuda"}
        assert run.sums.totals.device.type == run.sums.first_bad.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):  # so that this test can fail
            check_finite(run)


# ------------------------------------------------------------------------------------------------------- progress bars
@pytest.mark.parametrize(
    "options",
    [{}, {"eval_every": 2}, {"eval_every": 5}, {"cl": True}, {"cl": True, "cl_start": 3}, {"batch_size": 64}],
    ids=str,
)
def test_a_bar_ends_when_the_run_does(tmp_path, monkeypatch, options):
    given = {"option": ["count=20"], "size": 32, "known": 0.5, "model": "test_resnet", "weights": "none", "epochs": 3}
    given |= {"batch_size": 8, "eval_every": 1, "cl": False, "cft": False, "workers": 0, "threads": 1}
    bars = []

    @contextlib.contextmanager
    def bar(total, what, *, done=0, **options):
        bars.append([total, done])
        yield lambda images: bars[-1].__setitem__(1, bars[-1][1] + images)

    monkeypatch.setattr(loop, "progress_bar", bar)
    quiet = Console(quiet=True)
    config = make_config(given | options)
    loop.fit(config, tmp_path / "whole", console=quiet)
    assert bars[0][0] == bars[0][1] > 60  # images alone to train on, 16 or 20 an epoch, would be fewer
    for name, number in (("batch", 2), ("close_epoch", 2)):
        folder = tmp_path / name
        with monkeypatch.context() as patch:
            at_call(patch, loop.Training, name, number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(Interrupted):
                loop.fit(config, folder, console=quiet)
        loop.fit(config, folder, resume="must", console=quiet)
        assert bars[-1] == bars[0], name
