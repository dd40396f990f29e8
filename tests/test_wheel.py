"""The wheel that a user installs: everything in the package is in it, nothing else, and its metadata are whole."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from places import ROOT

import gpu_logicmix

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("gpu_logicmix", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = source.glob("*.whl")
    return zipfile.ZipFile(file)


def test_every_file_of_the_package_is_inside(wheel):
    source = ROOT / "gpu_logicmix"
    ours = {str(f.relative_to(ROOT)) for f in source.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {"gpu_logicmix/py.typed", "gpu_logicmix/constraints.txt"} <= inside
    assert inside == ours, "data files need a pattern in pyproject.toml, [tool.setuptools.package-data]"


def test_metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "gpu-logicmix"
    assert metadata["Version"] == gpu_logicmix.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# GPU LogicMix")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert {"train", "dev", "bench", "docs", "tensorboard"} <= set(metadata.get_all("Provides-Extra"))
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in needed) == ["numpy", "torch"]  # the transform needs no more
    folder = Path(name).parent
    assert "gpu-logicmix = gpu_logicmix.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert any(file.startswith(f"{folder}/") and file.endswith("LICENSE") for file in wheel.namelist())
