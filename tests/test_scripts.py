"""The scripts that make the lock and the floors, where they need no network."""

import sys

import pytest


def test_lock_text(script):
    lock = script("scripts/lock.py")
    new = {"a": "1", "b": "2"}
    text = lock.text({"3.10": {"a": "1", "b": "1"}, "3.11": new, "3.12": {**new, "c": "3"}})
    assert text.splitlines()[0].startswith("# Python 3.10, 3.11, 3.12:")
    assert text.splitlines()[2:] == [
        "a==1",
        'b==1 ; python_version == "3.10"',
        'b==2 ; python_version == "3.11" or python_version == "3.12"',
        'c==3 ; python_version == "3.12"',
    ]


def test_every_requirement_has_a_floor_and_is_locked(script):
    floors = script("scripts/floors.py")
    requirements = script("scripts/lock.py").requirements()
    assert len(requirements) > 15
    lock = floors.LOCK.read_text()
    for line in requirements:
        found = floors.LINE.fullmatch(line)
        assert found, f"{line}: no floor"
        assert f"\n{found['name'].lower()}==" in lock, f"{line}: not in the lock; run `make lock`"


def test_lowest(script, monkeypatch):
    floors = script("scripts/floors.py")
    monkeypatch.setattr(floors, "released", lambda name: ["1.9", "1.10.0", "1.10.1", "2.0"])
    assert floors.lowest("x", "1.10") == "1.10.0"
    assert floors.lowest("x", "1.9.1") == "1.10.0"
    with pytest.raises(SystemExit, match=r"x>=2\.1: no such version has a wheel"):
        floors.lowest("x", "2.1")


def test_the_warning_names_the_package(script):
    newer = script("scripts/newer.py")
    differing = newer.newer(
        {"timm": "1.0.32", "Torch": "2.15.0+cpu", "typing_extensions": "5.0", "unknown": "1"},
        {"timm": "1.0.31", "torch": "2.15.0", "typing-extensions": "4.16"},
    )
    assert set(differing) == {"timm", "typing-extensions"}
    log = '  File "/x/lib/python3.11/site-packages/timm/utils/model_ema.py", line 3, in __init__\nTypeError'
    text = newer.warning(log, differing)
    assert text.startswith("WARNING")
    assert "likely:  timm 1.0.32 (tested: 1.0.31)\n" in text
    assert "changed: typing-extensions 5.0 (tested: 4.16)" in text
    assert "not a package's doing" in newer.warning(log, {})


def test_the_warning_without_an_environment(script, monkeypatch, capsys, tmp_path):
    newer = script("scripts/newer.py")
    monkeypatch.setattr(sys, "argv", ["newer.py", str(tmp_path / "log"), str(tmp_path / "no" / "python")])
    newer.main()
    assert capsys.readouterr().out.startswith("WARNING: no environment")
