"""The command line as a whole: what is loaded when, how errors are worded, what survives a closed terminal."""

import inspect
import subprocess
import sys

import pytest
from commands import run
from conftest import ROOT

import gpu_logicmix
from gpu_logicmix import cli


def started(*arguments, code="", **options):
    """`gpu-logicmix ARGUMENTS` in a process of its own, after some code."""
    script = f"{code}\nfrom gpu_logicmix.cli import main\nmain({list(map(str, arguments))!r})"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, **options)


# ----- late importing
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["frobnicate"]])
def test_help_and_version_do_not_wait_for_torch(arguments):
    watch = "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))"
    loaded = set(started(*arguments, code=watch).stderr.split())
    assert "gpu_logicmix.cli" in loaded
    assert not loaded & {"torch", "numpy", "timm", "torchvision", "kornia", "PIL", "matplotlib"}


def test_the_list_of_commands_is_true():
    for name, entry in cli.COMMANDS.items():
        command = cli.load_command(name)
        assert command.name == name
        assert inspect.cleandoc(command.callback.__doc__).splitlines()[0] == entry.help
    code, text = run("--help")
    assert code == 0
    assert all(name in text for name in cli.COMMANDS)


def test_every_command_shows_an_example():
    for name in cli.COMMANDS:
        code, text = run(name, "--help")
        assert code == 0
        assert f"gpu-logicmix {name}" in text.partition("Options")[0].replace("Usage: gpu-logicmix", "")


def test_version():
    code, text = run("--version")
    assert code == 0
    assert f"gpu-logicmix {gpu_logicmix.__version__}" in text


def test_a_command_that_is_misspelled():
    code, text = run("evalute")
    assert code == 2
    assert "'evaluate'" in text
