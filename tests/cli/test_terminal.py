"""On a terminal, with everything that is written there: bars are shown and commands come to their end."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

BAR = """
import time
from gpu_logicmix.cli.screen import console, say
from gpu_logicmix.progress import progress_bar
with progress_bar(30, "decoding", console=console) as bar:
    for i in range(30):
        bar()
        if i % 10 == 0:
            say("a line above the bar")
            print("and one by print")
        time.sleep(0.05)
say("the end")
"""


def on_terminal(command, seconds):
    """What a command writes to a terminal of its own, and its exit code; killed if it takes longer."""
    mine, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    text, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([mine], [], [], 0.2)[0]:
            try:
                text += os.read(mine, 2**16)
            except OSError:  # nobody has it open any more
                break
    try:
        return child.wait(5), text.decode()
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return None, text.decode()
    finally:
        os.close(mine)


def test_a_bar_that_is_drawn_several_times():
    code, text = on_terminal([sys.executable, "-c", BAR], 60)
    assert code == 0, text
    assert "images/s" in text
    assert text.count("a line above the bar") == text.count("and one by print") == 3
    assert "the end" in text


@pytest.mark.slow
def test_a_run(tmp_path):
    options = "--model test_resnet --weights none --head linear --size 32 --epochs 3 --threads 1 --workers 0"
    command = f"-m gpu_logicmix fit shapes -o count=200 {options} --no-cl --cft-epochs 5 --out {tmp_path / 'run'}"
    code, text = on_terminal([sys.executable, *command.split()], 240)
    assert code == 0, text
    assert "images/s" in text
    assert (tmp_path / "run" / "report.html").exists()
