"""Fixtures shared by all tests: where the real data is, and which devices to test on."""

import importlib.util
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
from places import ROOT, SHARED

# The same examples each time where a failure must be one of the change at hand; new ones each time elsewhere.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

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
