"""Warn which package's new version is behind a failure with the latest versions: `newer.py LOG PYTHON`.

Compares what PYTHON has installed with the lock. Of the packages that differ, those that the log's tracebacks go
through are named first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpu_logicmix"))
from machine import lock_for  # by itself: the package needs torch, and may be what fails

LIST = """
import json, platform
from importlib.metadata import distributions
print(json.dumps([platform.python_version(), {d.metadata["Name"]: d.version for d in distributions()}]))
"""


def newer(installed: dict[str, str], lock: dict[str, str]) -> dict[str, str]:
    """Packages whose version is not the locked one: name -> "name 2.0 (tested: 1.0)"."""
    found = {}
    for name, version in installed.items():
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in lock and version.split("+")[0] != lock[name]:
            found[name] = f"{name} {version} (tested: {lock[name]})"
    return found


def suspects(log: str, differing: dict[str, str]) -> list[str]:
    """Those of the packages that the log speaks of, the most often named first."""
    counts = {}
    for name in differing:
        module = name.replace("-", "[-_]")
        counts[name] = len(re.findall(rf"site-packages/{module}\b|No module named '{module}\b|\b{module}\.\w+", log))
    return sorted((name for name in differing if counts[name]), key=lambda name: -counts[name])


def warning(log: str, differing: dict[str, str]) -> str:
    if not differing:
        return "WARNING: fails with the latest versions, which are the locked ones: not a package's doing"
    named = suspects(log, differing)
    rest = [name for name in differing if name not in named]
    lines = ["WARNING: the quick tests fail with the latest versions of packages; the lock still passes."]
    if named:
        lines.append("  likely:  " + ", ".join(differing[name] for name in named))
    if rest:
        lines.append("  changed: " + ", ".join(differing[name] for name in rest))
    return "\n".join(lines)


def main() -> None:
    log, python = sys.argv[1:]
    try:
        output = subprocess.run([python, "-c", LIST], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"WARNING: no environment with the latest versions could be made ({error}); the lock still passes")
        return
    running, installed = json.loads(output)
    print(warning(Path(log).read_text(errors="replace"), newer(installed, lock_for(running))))


if __name__ == "__main__":
    main()
