"""The command line as a whole: what is loaded when, how errors are worded, what survives a closed terminal."""

import inspect
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from commands import run
from places import ROOT
from trees import csv_tree

import gpu_logicmix
from gpu_logicmix import cli
from gpu_logicmix.cli import screen
from gpu_logicmix.cli.errors import BUG, MISTAKE, explain, in_options
from gpu_logicmix.losses.csl import read_prior, write_prior


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


def test_help_method():
    code, text = run("--help-method")
    assert code == 0
    assert "asl" in text
    assert "mlp" in text
    for arguments in (
        ("--help-method", "asl"),
        ("fit", "--help-method", "asl"),
        ("fit", "--size", 8, "--help-method", "asl"),
    ):
        code, text = run(*arguments)
        assert code == 0
        assert "--loss-option NAME=VALUE" in text
        assert "gamma_neg" in text
    code, text = run("--help-method", "gpu_logicmix.methods.plain:MLPHead")
    assert code == 0
    assert "--head-option" in text
    assert "--loss-option" not in text
    code, text = run("fit", "--help-method", "aslx")
    assert code == 2
    assert "unknown method 'aslx'; did you mean asl?" in text


# ----- errors
class Option:
    def __init__(self, name, *opts, no=(), kind="option"):
        self.name, self.opts, self.secondary_opts, self.param_type_name = name, list(opts), list(no), kind


OPTIONS = [
    Option("on_bad_image", "--on-bad-image"),
    Option("tune_images", "--tune-images"),
    Option("k_min", "--k-min"),
    Option("k_max", "--k-max"),
    Option("p", "--p"),
    Option("known", "--known"),
    Option("option", "-o", "--option"),
    Option("loss_option", "--loss-option"),
    Option("cft", "--cft", no=["--no-cft"]),
    Option("weights", "--weights"),
    Option("data", "data", kind="argument"),
]


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        (
            "a.png: cannot be decoded; on_bad_image='skip' goes on",
            "a.png: cannot be decoded; --on-bad-image skip goes on",
        ),
        ("tune_images=3: none left", "--tune-images 3: none left"),
        ("k_max=3: must not be below k_min=4", "--k-max 3: must not be below --k-min 4"),
        ("known=-0.5: must be above 0", "--known -0.5: must be above 0"),
        ("weights='a b.pth': no such file", "--weights 'a b.pth': no such file"),
        ('weights="it\'s.pth": no such file', "--weights 'it'\"'\"'s.pth': no such file"),
        ("option=['a=1', 'b=2']: twice", "--option a=1 --option b=2: twice"),
        ("loss_option='p=2': loss bce has no options", "--loss-option p=2: loss bce has no options"),
        ("cft=True is not possible, cft=False is", "--cft is not possible, --no-cft is"),
        ("data='csv:x.csv': empty", "csv:x.csv: empty"),
        # Not options of this command, and not options at all.
        ("reduction='x': must be mean", "reduction='x': must be mean"),
        ("/data/p=3.csv: no such file", "/data/p=3.csv: no such file"),
        ("top=3 and step=4", "top=3 and step=4"),
        ("run.toml: known=2: must be at most 1", "run.toml: known=2: must be at most 1"),
        (
            "x with pretrained=True: offline",
            "x with --weights hub: offline; without network access: --weights FILE.safetensors, or --weights none",
        ),
    ],
)
def test_errors_speak_of_options(python, typed):
    assert in_options(python, OPTIONS) == typed
    assert explain(ValueError(python), OPTIONS) == (typed, MISTAKE)


def test_other_errors():
    assert explain(FileNotFoundError(2, "No such file or directory", "a\x1b[2J.png")) == (
        "a\\x1b[2J.png: No such file or directory",
        MISTAKE,
    )
    assert explain(OSError("odd")) == ("odd", MISTAKE)
    text, code = explain(ModuleNotFoundError("No module named 'timm'", name="timm"))
    assert (code, 'pip install ".[train]" in a clone' in text) == (MISTAKE, True)
    text, code = explain(MemoryError())
    assert (code, text.startswith("out of memory (MemoryError); a smaller --size")) == (MISTAKE, True)
    for error in (
        KeyError("x"),
        RecursionError("deep\nand deeper"),
        AssertionError(),
        ModuleNotFoundError(name="gpu_logicmix.x"),
    ):
        text, code = explain(error)
        assert code == BUG == 70
        assert type(error).__name__ in text
        assert "this is a bug; GPU_LOGICMIX_DEBUG=1 shows where" in text
        assert f"gpu-logicmix {gpu_logicmix.__version__}" in text
        assert "\n" not in text


GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1964: Connection reset by peer. GLHF!"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(GLOO.replace("Read error ", "").replace("reset", "closed")),
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0"),
        torch.distributed.DistNetworkError("Failed to recv, got 0 bytes"),
    ],
)
def test_a_lost_process_is_no_bug_of_the_others(monkeypatch, error):
    monkeypatch.setenv("WORLD_SIZE", "2")
    text, code = explain(error, [*OPTIONS, Option("resume", "--resume")])
    assert code == MISTAKE
    assert text.startswith("another process of the run was lost (")
    assert str(error).split(". ")[0] in text
    assert text.endswith("); --resume continues it")
    assert explain(error, OPTIONS)[0].endswith("; run the command again")  # a command without --resume
    assert explain(RuntimeError("shapes do not match"))[1] == BUG
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert explain(error)[1] == BUG  # alone there is nobody to lose


BREAK = """
import gpu_logicmix.cli.options, gpu_logicmix.cli.data
def broken(*_):
    raise {error}
gpu_logicmix.cli.data.opened = broken
"""


def test_a_bug_ends_in_one_line_and_70():
    done = started("stats", code=BREAK.format(error="KeyError('[red]\\x1b[2J')"))
    assert done.returncode == 70
    assert done.stderr.startswith("error: KeyError: '[red]\\x1b[2J' (this is a bug; GPU_LOGICMIX_DEBUG=1 shows where")
    assert done.stderr.count("\n") == 1
    environment = {**os.environ, "GPU_LOGICMIX_DEBUG": "1"}
    done = started("stats", code=BREAK.format(error="KeyError(3)"), env=environment)
    assert "Traceback" in done.stderr
    assert ", in broken" in done.stderr


def test_ctrl_c_ends_in_130():
    done = started("stats", code=BREAK.format(error="KeyboardInterrupt"))
    assert (done.returncode, done.stderr) == (130, "")


def test_fit_without_data_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = run("fit", "--epochs", 1)
    assert code == 1
    assert "fit needs DATA: csv:PATH" in text
    assert not list(tmp_path.iterdir())


def test_an_error_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "o.toml"
    file.write_text("data = 'shapes'\nepochs = 0\n")
    code, text = run("fit", "--config", file)
    assert code == 1
    assert f"error: {file}: epochs=0: must be at least 1" in text
    code, text = run("fit", "--config", file, "--epochs", "-1")
    assert "error: --epochs -1: must be at least 1" in text


@pytest.mark.parametrize(("name", "words"), [(".", "is a folder; name a file in it"), ("no/x", "there is no folder")])
def test_out_is_checked_before_the_work(tmp_path, monkeypatch, name, words):
    def works(*_, **__):
        pytest.fail("went to work")

    monkeypatch.setattr("gpu_logicmix.train.stepbench.measure_step", works)
    monkeypatch.setattr("gpu_logicmix.train.prior.load_run", works)
    monkeypatch.setattr("gpu_logicmix.cli.data.opened", works)
    out = tmp_path / name
    for *command, option in (
        ("bench", "--out"),
        ("prior", tmp_path, "--out"),
        ("stats", "shapes", "--plot"),
        ("preview", "shapes", "--out"),
    ):
        code, text = run(*command, option, out)
        assert code == 1
        assert f"{option} {out}: {words}" in " ".join(text.split())


def test_a_prior_needs_a_name_for_each_category(tmp_path):
    file = tmp_path / "prior.csv"
    write_prior(file, ["cat", 'a "dog", big'], torch.tensor([0.25, 0.5]))
    before = file.read_bytes()
    with pytest.raises(ValueError, match="categories: 1 names for a prior of 2 entries; give one name for each"):
        write_prior(file, ["cat"], torch.tensor([0.75, 0.5]))
    assert file.read_bytes() == before
    assert read_prior(file) == {"cat": 0.25, 'a "dog", big': 0.5}


# ----- hostile names
EVIL = "[/red]\x1b[31mcat\u202e\\"


@pytest.fixture
def evil_csv(tmp_path):
    table = csv_tree(tmp_path / "d", f"image,{EVIL},[bold]dog\nimg/a.png,1,0\nimg/b.png,0,1\nimg/c.png,?,1\n")
    return f"csv:{table}"


def test_names_from_data_do_nothing_to_the_terminal(evil_csv, tmp_path):
    for arguments in (("stats", evil_csv), ("preview", evil_csv, "--size", 32, "--out", tmp_path / "[x]\x1b.png")):
        code, text = run(*arguments)
        assert code == 0, text
        assert "\x1b" not in text
        assert "\u202e" not in text
    code, text = run("stats", evil_csv)
    assert "[/red]\\x1b[31mcat\\u202e\\" in text
    assert "[bold]dog" in text
    code, text = run("stats", evil_csv, "--plot", tmp_path / "plot.png")
    assert code == 0, text
    assert "\x1b" not in text  # in a warning of matplotlib's
    code, text = run("stats", "csv:/no/[/red]\x1b[31m")
    assert code == 1
    assert "/no/[/red]\\x1b[31m" in text


def test_a_name_of_two_lines_is_drawn_as_one(tmp_path):
    table = csv_tree(tmp_path / "d", 'image,"two\nlines"\nimg/a.png,1\nimg/b.png,0\n')
    code, text = run("preview", f"csv:{table}", "--size", 32, "--out", tmp_path / "x.png")
    assert code == 0, text
    assert (tmp_path / "x.png").stat().st_size > 1000


# ----- a terminal that goes away
SMALL = """
    fit shapes -o count=40 --size 32 --model test_resnet --weights none --epochs 2 --no-cft --workers 0 --threads 1
    --log-every 1
"""


def test_a_closed_pipe_does_not_stop_a_run(tmp_path):
    command = f"{sys.executable} {ROOT / 'train.py'} {' '.join(SMALL.split())} --out {tmp_path / 'run'} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["kind"] == "end"


@pytest.mark.parametrize("redirect", [">&-", "> /dev/full", ">&- 2>&-", "2> /dev/full"])
def test_output_that_is_closed_or_full_is_no_error(redirect):
    code = "from gpu_logicmix.cli import main; main(['--version'])"
    command = f'{sys.executable} -c "{code}" {redirect}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_goes_where_stdout_is_now(monkeypatch):
    first, closed, narrow = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii")
    output = screen.Output()
    monkeypatch.setattr(sys, "stdout", first)
    output.write("one")
    monkeypatch.setattr(sys, "stdout", narrow)
    output.write("two …")
    output.flush()
    assert (first.getvalue(), narrow.buffer.getvalue()) == ("one", b"two ?")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    for _ in range(2):
        assert output.write("three") == 5
        output.flush()
    assert not output.isatty()
