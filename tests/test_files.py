"""files.py: files are whole or not there, and nothing that was planted beside them is followed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from gpu_logicmix import files
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import (
    csv_rows,
    open_plain,
    open_regular,
    read_json,
    read_text,
    waited_lock,
    write_whole,
    written_whole,
)


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def stops() -> None:
        with written_whole(path) as file:
            file.write("new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        stops()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    with written_whole(path, "wb") as file:
        file.write(b"new")
    assert path.read_text() == "new"


def test_the_rights_are_those_of_any_new_file(tmp_path):
    write_whole(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_planted_links_are_not_followed(tmp_path):
    outside, folder = tmp_path / "outside.txt", tmp_path / "run"
    outside.write_text("mine")
    folder.mkdir()
    for name in ("report.html", "report.html.tmp", "lock", "log.jsonl"):
        os.symlink(outside, folder / name)
    write_whole(folder / "report.html", "page")  # the link itself is replaced
    assert (folder / "report.html").read_text() == "page"
    assert not (folder / "report.html").is_symlink()
    with pytest.raises(OSError, match="symbolic link"), waited_lock(folder):
        pass
    with pytest.raises(OSError, match="symbolic link"):
        open_plain(folder / "log.jsonl", "a")
    assert outside.read_text() == "mine"


def test_temporary_names_cannot_be_guessed(tmp_path):
    seen = set()
    for _ in range(20):
        with written_whole(tmp_path / "a"):
            seen |= {p.name for p in tmp_path.iterdir() if p.name != "a"}
    assert len(seen) == 20


LEFT = """
import sys, time, pathlib
from gpu_logicmix.files import written_whole
with written_whole(pathlib.Path(sys.argv[1])) as file:
    print("open", flush=True)
    time.sleep(60)
"""


def test_what_a_kill_leaves_is_removed_and_what_is_being_written_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_STALE_SECONDS", 0.0)
    path = tmp_path / "a[1].txt"
    writer = subprocess.Popen([sys.executable, "-c", LEFT, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "open\n"
    write_whole(path, "mine")
    assert len(list(tmp_path.iterdir())) == 2  # the other one is still at work
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    time.sleep(0.01)
    write_whole(path, "mine again")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("opener", [open_regular, open_plain, read_text])
def test_a_fifo_is_refused_not_waited_for(tmp_path, opener):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((OSError, DataError), match=r"not a plain file|No such device"):
        opener(tmp_path / "pipe")


def test_two_writers_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    texts = [str(i) * 100_000 for i in range(4)]
    workers = [context.Process(target=write_whole, args=(tmp_path / "a", text)) for text in texts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "a").read_text() in texts


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' * 200_000, "nested too deeply"),
        ("[1, 2", "invalid JSON in line 1, column"),
        ("1" * 5000, "invalid JSON"),
        ("", "is empty"),
    ],
)
def test_bad_json_is_one_line(tmp_path, text, match):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=match) as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "a.json") in str(caught.value)


def test_good_json(tmp_path):
    write_whole(tmp_path / "a.json", json.dumps({"a": [1, None]}))
    assert read_json(tmp_path / "a.json") == {"a": [1, None]}


@pytest.mark.parametrize("bad", ["x" * 200_000, '"never closed'])
def test_what_is_not_csv_is_one_line_with_its_place(bad):
    rows = csv_rows("labels.csv", ["a,b\n", "\n", f"1,{bad}\n"], strict=True)
    assert next(rows) == (1, ["a", "b"])  # the blank line is passed over
    with pytest.raises(DataError, match=r"^labels\.csv, line 3: not a CSV row \([^\n]+\)$"):
        next(rows)
