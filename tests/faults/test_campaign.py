"""A campaign of faults, seeded and bounded in time: kills, signals, full disks, corruption, crowds, hostile files.

Each trial ends in one of two ways: the run (or command) goes on exactly, bit for bit, or it ends in one line that names
a file and a way out. Anything else fails the campaign. It prints what was tried. Each kind of fault is a test, so that
several processes share the work, and has its part of the time; one trial at least.

    make test                                  # a third of a minute of it
    FAULTS_SECONDS=300 FAULTS_SEED=7 python -m pytest -s tests/faults
"""

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import Command, good, ranks, run
from safetensors.torch import load_file
from trees import csv_tree

from gpu_logicmix.data import DataError, open_dataset
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.runlog import read_log

SECONDS = float(os.environ.get("FAULTS_SECONDS", 20))
SEED = int(os.environ.get("FAULTS_SEED", 0))
FIT = [
    "fit",
    "shapes",
    "-o",
    "count=32",
    "--size",
    "32",
    "--known",
    "0.5",
    "--model",
    "test_resnet",
    "--weights",
    "none",
    "--head",
    "linear",
    "--batch-size",
    "8",
    "--accumulate",
    "2",
    "--epochs",
    "3",
    "--theta-pos",
    "0.2",
    "--theta-neg",
    "-0.2",
    "--no-cft",
    "--log-every",
    "1",
    "--workers",
    "0",
    "--threads",
    "1",
    "--save-every",
    "1e-9",
    "--bank",
    "8",
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(folder: Path, reference: Path) -> None:
    one, two = weights(folder), weights(reference)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    steps = [
        [(line["step"], line["loss"]) for line in read_log(f) if line["kind"] == "step"] for f in (folder, reference)
    ]
    assert steps[0] == steps[1]


def assert_one_line(command: Command, *allowed: int) -> None:
    """It ended as a program ends for a mistake of its user's: no traceback, and not as a bug of ours."""
    assert command.process.exitcode in (allowed or (1,)), f"exit {command.process.exitcode}: {command.text[-2000:]}"
    assert "Traceback" not in command.text, command.text[-2000:]
    errors = [line for line in command.err.splitlines() if line.startswith("error:")]
    assert len(errors) == (command.process.exitcode == 1), command.err[-2000:]


def at_call(where: str, name: str, number: int, signum: int) -> None:
    """In the process of a run: a signal to itself at call `number` of a function."""
    import importlib

    module = importlib.import_module(where)
    function, calls = getattr(module, name), [0]

    def counted(*arguments, **options):
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signum)
        return function(*arguments, **options)

    setattr(module, name, counted)


class Campaign:
    """The trials: each method is one kind of fault, called with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.rng = random.Random(SEED)
        self.reference, self.stopped = folder / "reference", folder / "stopped"
        good(folder, *FIT, "--out", self.reference)
        run(
            folder,
            *FIT,
            "--out",
            self.stopped,
            hook=(at_call, "gpu_logicmix.train.loop", "seed_step", 7, signal.SIGTERM),
        )
        assert read_checkpoint(self.stopped / "last.pt")["step"] == 8

    def resumed(self, place: Path) -> None:
        good(place, "fit", "--out", place / "run", "--resume", "auto", *FIT[1:])
        assert_same(place / "run", self.reference)

    # ------------------------------------------------------------------------------------------- processes and signals
    def kill_at_a_named_point(self, place: Path) -> None:
        where, name, calls = self.rng.choice(
            [
                ("gpu_logicmix.train.loop", "seed_step", 12),
                ("gpu_logicmix.train.loop", "save_checkpoint", 8),
                ("gpu_logicmix.train.checkpoint", "write_checkpoint", 8),
                ("gpu_logicmix.files", "sync_folder", 8),
                ("gpu_logicmix.train.finish", "write_model", 1),
                ("gpu_logicmix.train.finish", "write_predictions", 1),
            ]
        )
        hook = (at_call, where, name, self.rng.randint(1, calls), signal.SIGKILL)
        assert run(place, *FIT, "--out", place / "run", hook=hook).process.exitcode in (0, -signal.SIGKILL)
        self.resumed(place)

    def kill_at_any_time(self, place: Path) -> None:
        with Command(place, *FIT, "--out", place / "run") as command:
            command.process.join(self.rng.uniform(0.2, 4))
            if command.process.exitcode is None:
                command.signal(signal.SIGKILL)
            command.process.join()
        self.resumed(place)

    def signal_at_any_step(self, place: Path) -> None:
        signum = self.rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        hook = (at_call, "gpu_logicmix.train.loop", "seed_step", self.rng.randint(1, 12), signum)
        command = run(place, *FIT, "--out", place / "run", hook=hook)
        assert_one_line(command, 130 if signum == signal.SIGINT else 0)
        assert "resume with" in command.text
        self.resumed(place)

    def one_of_two_ranks_is_told_to_stop(self, place: Path) -> None:
        hook = (at_call, "gpu_logicmix.train.loop", "seed_step", self.rng.randint(1, 5), signal.SIGTERM)
        for command in ranks(place, 2, *FIT, "--batch-size", 4, "--out", place / "run", hook=hook):
            assert_one_line(command, 0)
        good(place, "fit", "--out", place / "run", "--resume")  # and the other one is not replaced
        assert read_checkpoint(place / "run" / "last.pt")["closed"] == 3

    def a_second_process_in_the_same_folder(self, place: Path) -> None:
        with Command(place, *FIT, "--epochs", 300, "--out", place / "run") as first:
            end = time.monotonic() + 100
            while not (place / "run" / "last.pt").exists() and time.monotonic() < end:
                time.sleep(0.01)
            second = run(place, *FIT, "--epochs", 300, "--out", place / "run", "--resume", "auto")
            assert_one_line(second)
            assert "in use by another process" in second.err
            first.signal(signal.SIGKILL)

    def two_processes_build_one_cache(self, place: Path) -> None:
        cached = (*FIT, "--cache", place / "cache")
        first = Command(place, *cached, "--out", place / "run")
        second = Command(place, *cached, "--out", place / "other")
        for command in (first, second):
            with command:
                assert command.wait() == 0, command.text
        assert_same(place / "run", self.reference)
        assert_same(place / "other", self.reference)

    # ----------------------------------------------------------------------------------------------------------- disks
    def full_disk(self, place: Path) -> None:
        limit = int(10 ** self.rng.uniform(1, 6.2))
        command = run(place, *FIT, "--out", place / "run", limit=limit)
        assert_one_line(command, 0, 1)
        self.resumed(place)

    def lost_stdout(self, place: Path) -> None:
        assert (
            run(place, *FIT, "--out", place / "run", hook=(close_stdout, self.rng.random() < 0.5)).process.exitcode == 0
        )
        assert_same(place / "run", self.reference)

    # ------------------------------------------------------------------------------------------------------ corruption
    def damaged(self, place: Path, source: Path) -> Path:
        shutil.copytree(source, place / "run")
        file = self.rng.choice([f for f in sorted((place / "run").iterdir()) if f.name != "lock"])
        content = bytearray(file.read_bytes())
        how = self.rng.choice(["garbage", "cut", "empty", "bit", "other"])
        if how == "garbage" and len(content) > 64:
            at = self.rng.randrange(len(content) - 64)
            content[at : at + 64] = self.rng.randbytes(64)
        elif how == "cut":
            del content[self.rng.randrange(len(content)) :]
        elif how == "bit" and content:
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        elif how == "other":
            content = bytearray(self.rng.choice([b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 5000, b"0"]))
        else:
            content = bytearray()
        file.write_bytes(content)
        return file

    def resume_with_a_damaged_file(self, place: Path) -> None:
        file = self.damaged(place, self.stopped)
        command = run(place, "fit", "--out", place / "run", "--resume")
        assert_one_line(command, 0, 1)
        if command.process.exitcode == 0:
            ours = weights(place / "run")
            same = all(torch.equal(ours[key], value) for key, value in weights(self.reference).items())
            # An option of config.toml may have become another valid one; the checkpoint then refuses unless it is free.
            assert same or file.name == "config.toml", file.name

    def evaluate_with_a_damaged_file(self, place: Path) -> None:
        self.damaged(place, self.reference)
        out = place / "scores.json"
        command = run(place, "evaluate", place / "run", "--out", out, "--threads", 1, "--batch-size", 8)
        assert_one_line(command, 0, 1)

    # --------------------------------------------------------------------------------------------------- hostile files
    def planted_links(self, place: Path) -> None:
        shutil.copytree(self.stopped, place / "run")
        victim = place / "victim"
        victim.write_text("mine")
        names = [
            "lock",
            "log.jsonl",
            "log.jsonl.tmp",
            "config.toml.tmp",
            "next.pt",
            "report.html.tmp",
            "epochs.csv.tmp",
        ]
        for name in self.rng.sample(names, 3):
            (place / "run" / name).unlink(missing_ok=True)
            (place / "run" / name).symlink_to(victim)
        assert_one_line(run(place, "fit", "--out", place / "run", "--resume"), 0, 1)
        assert victim.read_text() == "mine"

    def names_with_markup_and_escapes(self, place: Path) -> None:
        hostile = ["[bold]cat[/bold]", "[/]", "\x1b[31mred", "a\x07b", "[link=file:///etc/passwd]x[/link]", "\u202egnp"]
        one, two = self.rng.sample(hostile, 2)
        rows = [f"{chr(97 + i)}.png" for i in range(3)]
        table = csv_tree(place / "data", "image,split\n")
        lines = [f'image,split,"{one}","{two}"', *(f"img/{name},train,1,0" for name in rows), f"img/{rows[0]},val,1,1"]
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for command in (
            run(place, "stats", f"csv:{table}"),
            run(place, "stats", f"csv:{place}/{one.replace('/', '')}"),
        ):
            assert_one_line(command, 0, 1)
            assert not {"\x1b", "\x07", "\u202e"} & set(command.text)

    def fuzzed_tables(self, place: Path) -> None:
        text = "image,split,cat,dog\nimg/a.png,train,1,0\nimg/b.png,train,0,?\nimg/c.png,val,1,1\n"
        table = csv_tree(place / "data", text)
        for _ in range(40):
            content = bytearray(text.encode())
            for _ in range(self.rng.randint(1, 4)):
                at = self.rng.randrange(len(content))
                content[at : at + self.rng.randint(0, 3)] = self.rng.choice(
                    [b"", b"\x00", b'"', b",,", b"\n", b"\xff", b"../"]
                )
            table.write_bytes(content)
            with contextlib.suppress(DataError):  # in one line; anything else is an error of ours
                assert np.isin(open_dataset(f"csv:{table}", "train", 16).labels, (-1, 0, 1)).all()


def close_stdout(whole: bool) -> None:
    """As when the reader of a pipe is gone, or the terminal closed."""
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(read)
    if whole:
        os.close(1)


TRIALS = [
    name
    for name, value in vars(Campaign).items()
    if callable(value) and not name.startswith("_") and name not in ("resumed", "damaged")
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_campaign(campaign, tmp_path, capsys, name):
    campaign.rng = random.Random(f"{SEED} {name}")
    failures, number, end = [], 0, time.monotonic() + SECONDS / len(TRIALS)
    while not number or time.monotonic() < end:
        number += 1
        place = tmp_path / f"{number}"
        place.mkdir()
        try:
            getattr(campaign, name)(place)
            shutil.rmtree(place)
        except (AssertionError, OSError, ValueError) as error:
            failures.append(f"trial {number}: {str(error)[:1500]}")
    with capsys.disabled():
        survived = number - len(failures)
        print(f"\n  {name.replace('_', ' '):45} seed {SEED}  tried {number:3}  survived {survived:3}")
    assert not failures, "\n\n".join(failures)
