"""signals.py, and kills: a run that is stopped or killed at any moment resumes to the same result."""

import os
import random
import signal

import pytest
from launch import SMALL, Command, good, until
from runs import ALWAYS, assert_same_run, at_call, here, steps_in, stopped

from gpu_logicmix.train import finetune, finish, loop, predict

pytestmark = pytest.mark.usefixtures("no_report")


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
        (finetune, "tuned", 1, signal.SIGTERM, "stopped; resume with"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else None,
)
def test_stopped_and_resumed(tmp_path, monkeypatch, reference, owner, name, number, signum, words):
    folder = tmp_path / "run"
    code, text = stopped(monkeypatch, folder, owner, name, number, signum)
    assert code == (0 if signum == signal.SIGTERM and "resume" in words else 128 + signum), text
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
