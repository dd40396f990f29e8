"""distributed.py: one process against two; ranks that stop, are killed and come back."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import PLAIN, SMALL, good, ranks, run, until
from oracles import same
from places import ROOT
from runs import (
    ALWAYS,
    assert_same_run,
    at_call,
    largest_difference,
    log_of,
    steps_in,
)

from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.runlog import read_log


# -------------------------------------------------------------------------------------------------------- two processes
def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "last.pt")["model"]


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


def test_two_processes_judge_the_same_model_without_an_average(tmp_path):
    """Batch norms have seen each process's own images; the best epoch is one model, with one checksum."""
    for command in ranks(tmp_path, 2, *SMALL, "--ema-decay", 0, "--out", tmp_path / "run"):
        assert command.process.exitcode == 0, command.text
    assert log_of(tmp_path / "run")


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
    assert f"resuming with {after} process{'es' if after > 1 else ''} in place of {before}" in commands[0].text
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


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """The small run in two processes, uninterrupted."""
    folder = tmp_path_factory.mktemp("both")
    for command in ranks(folder, 2, *SMALL, "--batch-size", 4, "--out", folder / "run"):
        assert command.process.exitcode == 0, command.text
    return folder / "run"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_one_of_two_processes_is_told_to_stop(tmp_path, both, signum):
    """They agree on a step, save there, and go on from there."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--batch-size", 4, "--out", folder)
    for command in ranks(tmp_path, 2, *arguments, hook=(stop_rank_one, signum)):
        assert command.process.exitcode == (130 if signum == signal.SIGINT else 0), command.text
    assert read_checkpoint(folder / "last.pt")["step"] == 4
    for command in ranks(tmp_path, 2, *arguments, "--resume", "auto"):
        assert command.process.exitcode == 0, command.text
    assert_same_run(folder, both)


def test_each_of_two_processes_gets_its_own_bank_back(tmp_path):
    arguments = (*SMALL, "--batch-size", 4, "--bank", 16, "--p", 1, "--no-cft", "--no-decisions")
    for name, hook in (("whole", None), ("run", (stop_in_step, 4))):
        for command in ranks(tmp_path, 2, *arguments, "--out", tmp_path / name, hook=hook):
            assert command.process.exitcode == 0, command.text
    for command in ranks(tmp_path, 2, "fit", "--out", tmp_path / "run", "--resume"):
        assert command.process.exitcode == 0, command.text
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def stop_rank_one(signum: int) -> None:
    if os.environ["RANK"] == "1":
        patch = pytest.MonkeyPatch()
        at_call(patch, loop, "seed_step", 3, lambda *_: os.kill(os.getpid(), signum))


def test_rank_that_is_killed_under_torchrun_comes_back(tmp_path, both):
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
    assert_same_run(folder, both)


def rank_process(torchrun: int, rank: int) -> int:
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and f"\0RANK={rank}\0" in f"\0{(place / 'environ').read_text()}\0":
                return int(place.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank} below process {torchrun}")
