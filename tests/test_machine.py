"""Versions, and whether they are the tested ones."""

import platform
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from gpu_logicmix import __version__
from gpu_logicmix.machine import LOCK, TESTED_PYTHONS, lock_for, machine, untested, version_line, versions

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_is_read_as_pip_reads_it(python):
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    chosen = [r for r in requirements if r.marker is None or r.marker.evaluate({"python_version": python})]
    assert {r.name: str(r.specifier) for r in chosen} == {k: f"=={v}" for k, v in lock_for(python + ".1").items()}
    assert len(chosen) == len({r.name for r in chosen}) > 50
    assert {"torch", "timm", "kornia", "pytest", "numpy", "mkdocs"} <= set(lock_for(python))


def test_the_lock_names_no_place_and_no_hash():
    assert not re.search(r"https?:|file:|@|--|sha256", LOCK.read_text())


def test_versions():
    found = versions()
    assert found["gpu_logicmix"] == __version__
    assert found["python"] == platform.python_version()
    assert found["torch"] == version("torch")
    assert machine().strip()


def found(**other) -> dict[str, str]:
    lock = lock_for("3.11")
    return {"gpu_logicmix": "1.2.3", "python": "3.11.9", **{k: lock[k] for k in ("torch", "timm", "kornia")}, **other}


def test_the_line_for_tested_versions():
    line = version_line(found())
    assert line.endswith("Python 3.11.9; tested with these versions")
    assert line.startswith(f"gpu-logicmix 1.2.3, torch {lock_for('3.11')['torch']}, timm ")
    assert "\n" not in version_line()
    local = found()["torch"] + "+cpu"  # another build of the same version
    assert version_line(found(torch=local)).endswith("tested with these versions")


def test_the_line_names_what_was_not_tested():
    line = version_line(found(timm="9.9.9"))
    assert line.endswith(f"; not tested with timm 9.9.9 (tested: {lock_for('3.11')['timm']})")
    assert version_line(found(python="3.99.1")).endswith("Python 3.99.1; not tested with Python 3.99.1")
    if "3.12" not in TESTED_PYTHONS:  # in the lock, but the suite has not been run on it
        assert version_line(found(python="3.12.1")).endswith("; not tested with Python 3.12.1")
    without = found()
    del without["kornia"]  # only an example needs it
    assert "kornia not installed" in version_line(without)
    assert untested(without) == ""


@pytest.mark.parametrize("broken", [{}, {"torch": "2.15.0"}, {"python": "none"}, {"python": "3.11", "torch": ""}])
def test_a_log_of_another_kind_still_gives_a_line(broken):
    assert version_line(broken).startswith("gpu-logicmix ")


def test_the_module_needs_the_standard_library_alone():
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(LOCK.with_name('machine.py'))!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
