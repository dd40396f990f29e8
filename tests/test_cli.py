"""The command line, as a user types it: what works, and one line for what does not."""

import subprocess
import sys

import pytest
from PIL import Image
from test_data_formats import csv_tree
from typer.testing import CliRunner

from gpu_logicmix import cli


def run(*arguments):
    """In this process: the way `main` does it. Returns exit code and output."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return result.exit_code, result.output + (f"error: {result.exception}" if result.exception else "")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=200))


def test_stats(tmp_path, capsys):
    plot = tmp_path / "stats.png"
    code, _ = run("stats", "shapes", "-o", "count=300", "--known", "0.3", "--plot", plot, "--protocol", "hcp")
    assert code == 0
    assert plot.stat().st_size > 5000
    for extra in (["--protocol", "single-positive"], ["--protocol", "per-class", "--known", "5"], ["--all"]):
        assert run("stats", "shapes", "-o", "count=50", *extra)[0] == 0


def test_preview(tmp_path):
    out = tmp_path / "preview.png"
    code, text = run("preview", "shapes", "--known", "0.5", "--count", "3", "--size", "32", "--out", out)
    assert code == 0, text
    with Image.open(out) as picture:
        assert picture.width > 3 * 192
    csv = csv_tree(tmp_path / "d", "image,cat\nimg/a.png,1\nimg/b.png,0\nimg/c.png,?\n")
    (tmp_path / "d" / "img" / "b.png").write_bytes(b"broken")
    code, text = run("preview", f"csv:{csv}", "--out", out)
    assert code == 1
    assert "b.png: cannot be decoded" in text
    assert run("preview", f"csv:{csv}", "--out", out, "--on-bad-image", "skip")[0] == 0


def test_cache(tmp_path):
    for _ in range(2):
        code, text = run("cache", "shapes", "--to", tmp_path, "--size", "16", "-o", "count=40", "--verify")
        assert code == 0, text
    assert (tmp_path / "shapes-train-16" / "images.u8").stat().st_size == 40 * 16 * 16 * 3
    code, text = run("cache", "shapes", "--to", tmp_path, "--size", "16", "-o", "count=41")
    assert code == 1
    assert "--rebuild" in text
    assert run("cache", "shapes", "--to", tmp_path, "--size", "16", "-o", "count=41", "--rebuild")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stats", "coco:/nowhere"), "/nowhere: no such file or folder"),
        (("stats", "shape"), "'shape' is no dataset"),
        (("stats", "shapes", "--known", "1.5"), "known=1.5: must be above 0 and at most 1"),
        (("stats", "shapes", "-o", "count"), "--option 'count': write NAME=VALUE"),
        (("stats", "shapes", "-o", "size=3"), "write --size 3"),
        (("stats", "shapes", "-o", "colour=3"), "option 'colour': shapes has the options count, seed"),
        (("stats", "shapes", "--k-min", "4"), "k_max=3"),
        (("preview", "shapes", "--p", "2"), "p=2"),
    ],
)
def test_mistakes(arguments, words):
    code, text = run(*arguments)
    assert code == 1
    assert words in text


def test_train_py_ends_in_one_line_and_teaches():
    from conftest import ROOT

    def train(*arguments):
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    wrong = train("stats", "coco:/nowhere")
    assert wrong.returncode == 1
    assert wrong.stderr.strip() == "error: /nowhere: no such file or folder"
    assert wrong.stdout == ""
    assert train("frobnicate").returncode == 2
    text = train("cache", "--help").stdout
    assert "Example: gpu-logicmix cache" in " ".join(text.split())
