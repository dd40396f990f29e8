"""Write gpu_logicmix/constraints.txt: exact versions of everything that any extra installs, for each Python.

    python scripts/lock.py              # keeps what is locked, adds what pyproject.toml asks for since
    python scripts/lock.py --upgrade    # the latest of everything; then `make test` has to pass with each Python

pip resolves for each Python found (python3.10 ... on PATH, or pyenv's) from metadata alone: no wheel is installed.
The file holds names and versions, no hash and no address: it serves any mirror of the package index.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "gpu_logicmix" / "constraints.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def find(python: str) -> str:
    """The interpreter of a Python version, as 3.12."""
    if sys.version_info[:2] == tuple(map(int, python.split("."))):
        return sys.executable
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    for found in [shutil.which(f"python{python}"), *map(str, reversed(of_pyenv))]:
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:  # a shim may lead nowhere
            return found
    sys.exit(f"Python {python} not found: put python{python} on PATH, or install it with pyenv")


def requirements() -> list[str]:
    """Everything that pyproject.toml names, in any extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return sorted({line for group in groups for line in group if not line.startswith(project["name"] + "[")})


def resolve(pip: Path, interpreter: str, constraints: Path | None) -> dict[str, str]:
    """The versions that pip would install with an interpreter, by normalized name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        options = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", report.name]
        if constraints is not None:
            options += ["-c", str(constraints)]
        subprocess.run([str(pip), "--python", interpreter, *options, *requirements()], check=True)
        packages = [item["metadata"] for item in json.load(report)["install"]]
    return {re.sub(r"[-_.]+", "-", p["name"]).lower(): p["version"].split("+")[0] for p in packages}


def text(resolved: dict[str, dict[str, str]]) -> str:
    """The lock: a line where all Pythons have the same version, else one for each version, with a marker."""
    lines = [
        f"# Python {', '.join(resolved)}: what the tests run with. Written by scripts/lock.py; do not edit.",
        "# Names and versions only. Lines without a marker are for all of these Pythons.",
    ]
    for name in sorted({name for versions in resolved.values() for name in versions}):
        pythons: dict[str, list[str]] = {}
        for python, versions in resolved.items():
            if name in versions:
                pythons.setdefault(versions[name], []).append(python)
        for version, having in pythons.items():
            marker = " or ".join(f'python_version == "{python}"' for python in having)
            lines.append(f"{name}=={version}" + (f" ; {marker}" if having != list(resolved) else ""))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="forget the versions that are locked now")
    keep = LOCK if LOCK.exists() and not parser.parse_args().upgrade else None
    interpreters = {python: find(python) for python in PYTHONS}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = Path(folder) / "bin" / "pip"
        # Older ones download every wheel for a dry run.
        subprocess.run([str(pip), "install", "--quiet", "--upgrade", "pip>=24"], check=True)
        resolved = {}
        for python, interpreter in interpreters.items():
            print(f"Python {python} …", flush=True)
            resolved[python] = resolve(pip, interpreter, keep)
    LOCK.write_text(text(resolved))
    print(f"{LOCK.relative_to(ROOT)}: {len(LOCK.read_text().splitlines()) - 2} lines")


if __name__ == "__main__":
    main()
