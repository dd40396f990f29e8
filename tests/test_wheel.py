"""The wheel that a user installs: all of the package is in it, nothing else, its metadata are whole, and it works
where nothing is but what it asks for.

A clean environment with torch is 5 GB and minutes. Here it is a new one into which links lead, to the packages that the
requirement reaches and to no other; pip, which may fetch nothing, must find them enough.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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
    assert any("arxiv.org" in url for url in metadata.get_all("Project-URL"))
    assert {"train", "dev", "bench", "docs", "tensorboard"} <= set(metadata.get_all("Provides-Extra"))
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in needed) == ["numpy", "torch"]  # the transform needs no more
    folder = Path(name).parent
    assert "gpu-logicmix = gpu_logicmix.__main__:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert any(file.startswith(f"{folder}/") and file.endswith("LICENSE") for file in wheel.namelist())


# -------------------------------------------------------------------------------------------------- a clean environment
def needed(metadata, extra: str = "") -> set[str]:
    """Names of the packages that metadata ask for, and those of these, as pip would take them here."""
    names: set[tuple[str, str]] = set()
    todo = [(metadata, extra)]
    while todo:
        about, asked = todo.pop()
        for requirement in map(Requirement, about.get_all("Requires-Dist") or []):
            if requirement.marker and not requirement.marker.evaluate({"extra": asked}):
                continue
            name = canonicalize_name(requirement.name)
            for of in ("", *requirement.extras):
                if (name, of) not in names:
                    names.add((name, of))
                    todo.append((distribution(name).metadata, of))
    return {name for name, _ in names}


def clean_environment(folder: Path, names: set[str]) -> Path:
    """A new environment with links to what these packages have installed. Returns its bin."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    here = Path(sysconfig.get_path("purelib"))
    for name in names:
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top != ".." and top != "__pycache__" and not (site / top).is_symlink():
                (site / top).symlink_to(here / top)
    return folder / "bin"


def install(folder: Path, wheel: zipfile.ZipFile, extra: str = "") -> Path:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    bin = clean_environment(folder, needed(message_from_bytes(wheel.read(name)), extra))
    what = wheel.filename + (f"[{extra}]" if extra else "")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(bin / "python")]
    done = subprocess.run([*pip, "install", "--no-index", what], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return bin


def run(bin: Path, *command: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([bin / command[0], *command[1:]], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_with_torch_alone_the_readmes_line_works(wheel, tmp_path):
    bin = install(tmp_path / "env", wheel)
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    absent = ["PIL", "kornia", "matplotlib", "rich", "timm", "torchvision", "typer", "yaml"]
    script = f"""
import importlib.util, torch
assert [name for name in {absent} if importlib.util.find_spec(name)] == []
images, targets = torch.rand(8, 3, 32, 32), torch.randint(-1, 2, (8, 5))
{block}
import gpu_logicmix
print(gpu_logicmix.__file__, *images.shape, *targets.shape)
"""
    where, *shapes = run(bin, "python", "-c", script, cwd=tmp_path).split()
    assert Path(where).is_relative_to(tmp_path)
    assert shapes == ["8", "3", "32", "32", "8", "5"]
    with pytest.raises(AssertionError) as refused:
        run(bin, "gpu-logicmix", "--help", cwd=tmp_path)
    assert 'the commands need: pip install ".[train]" in a clone' in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_with_train_the_demo_runs(wheel, tmp_path):
    bin = install(tmp_path / "env", wheel, "train")
    for name in ("pyarrow", "onnx", "lightning", "sklearn", "mlcpl"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            run(bin, "python", "-c", f"import {name}", cwd=tmp_path)
    run(bin, "gpu-logicmix", "demo", "--quick", "--out", "demo", cwd=tmp_path)
    assert (tmp_path / "demo" / "demo.html").exists()
    assert (tmp_path / "demo" / "logicmix" / "report.html").exists()
