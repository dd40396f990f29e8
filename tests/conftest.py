"""Fixtures shared by all tests: where the real data is, and which devices to test on."""

import functools
import importlib.util
import inspect
import os
import signal
from pathlib import Path

import hypothesis
import launch
import pytest
import torch
from cases import examples
from places import ROOT, SHARED

# The same examples each time where a failure must be one of the change at hand; new ones each time elsewhere.
hypothesis.settings.register_profile("here", derandomize=bool(os.environ.get("CI")), max_examples=examples(100))
hypothesis.settings.load_profile("here")

# A shell that starts the tests in the background has Ctrl-C ignored, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data (a piece of COCO, its labels, ImageNet weights)."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no real data at {SHARED}; set GPU_LOGICMIX_SHARED to the folder that holds data/ and weights/")
    return SHARED


@pytest.fixture
def script(monkeypatch):
    """A script by its path, as "bench/step.py", as a module."""

    def load(path: str):
        file = ROOT / path
        monkeypatch.syspath_prepend(file.parent)  # as when the script is run
        spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


# ---------------------------------------------------------------------------------------------------- slow tests
# Which tests are slow follows from what they do, so that no list grows old: they start processes or compile;
# themselves, in a function of their file, or in a fixture. Others are marked by hand.
STARTS = {"Popen", "start_processes", "spawn", "check_call", "subprocess"}


def _is_slow(function, seen: set) -> bool:
    function = inspect.unwrap(getattr(getattr(function, "hypothesis", None), "inner_test", function))
    if function in seen or not hasattr(function, "__code__"):
        return False
    seen.add(function)
    codes = [function.__code__]
    codes += [constant for constant in function.__code__.co_consts if inspect.iscode(constant)]
    names = {name for code in codes for name in code.co_names}
    values = [function.__globals__.get(name) for name in names]
    if names & STARTS or {"torch", "compile"} <= names or any(value is launch for value in values):
        return True
    if any(getattr(value, "__module__", "") == "launch" and callable(value) for value in values):
        return True
    own = [v for v in values if inspect.isfunction(v) and v.__globals__ is function.__globals__]
    return any(_is_slow(value, seen) for value in own)


def pytest_collection_modifyitems(items) -> None:
    is_slow = functools.cache(lambda function: _is_slow(function, set()))
    for item in items:
        fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
        if any(is_slow(function) for function in (item.function, *fixtures)):
            item.add_marker(pytest.mark.slow)
