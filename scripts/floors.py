"""Print, as constraints, the lowest version of each direct requirement that pyproject.toml allows and that has a wheel
for the running Python. `make test-floor` installs them and runs the suite.

    python scripts/floors.py > floors.txt
"""

from __future__ import annotations

import re
import subprocess
import sys

from lock import LOCK, requirements  # noqa: F401

LINE = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?>=(?P<floor>[\d.]+)\s*(?:;.*)?")


def released(name: str) -> list[str]:
    """Versions of a package that have a wheel for the running Python, oldest first. No previews, no local builds."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--only-binary", ":all:", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    listed = re.search(r"Available versions: (.*)", output)
    if listed is None:
        sys.exit(f"{name}: pip lists no versions:\n{output}")
    return [version for version in reversed(listed[1].split(", ")) if re.fullmatch(r"[\d.]+", version)]


def numbers(version: str) -> tuple[int, ...]:
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:  # 2.10 and 2.10.0 are the same
        parts.pop()
    return tuple(parts)


def lowest(name: str, floor: str) -> str:
    for version in released(name):
        if numbers(version) >= numbers(floor):
            return version
    sys.exit(f"{name}>={floor}: no such version has a wheel for Python {sys.version.split()[0]}")


def main() -> None:
    for line in requirements():
        found = LINE.fullmatch(line)
        if found is None:
            sys.exit(f"pyproject.toml: {line!r} has no floor; write it as NAME>=VERSION")
        if "python_version < '3.11'" in line and sys.version_info >= (3, 11):
            continue
        print(f"{found['name']}=={lowest(found['name'], found['floor'])}", flush=True)


if __name__ == "__main__":
    main()
