"""The architecture, enforced: a layer imports only from layers above it; no long files, no long functions."""

import ast
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "gpu_logicmix"
# From the top down, as in docs/architecture.md. What shares a line may not import each other.
LAYERS = [
    ("errors", "registry", "machine"),
    ("files", "progress"),
    ("labels",),
    ("metrics",),
    ("decisions",),
    ("augment",),
    ("integrations",),
    ("losses",),
    ("curriculum",),
    ("cft",),
    ("methods",),
    ("models",),
    ("data",),
    ("train",),
    ("report",),
    ("study",),
    ("cli",),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The library: what `from gpu_logicmix import *` gives stands on these, and on torch and numpy alone.
LIBRARY = ("errors", "registry", "machine", "labels", "metrics", "augment", "losses", "curriculum", "cft", "methods")
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.stem.startswith("__"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of every module that is imported, also within functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_every_part_of_the_package_has_a_layer():
    assert {layer_of(path) for path in FILES} <= set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_layer_imports_only_from_layers_above_it(path):
    own = layer_of(path)
    wrong = []
    for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if package != "gpu_logicmix" or other == own or name == "gpu_logicmix.__version__":
            continue
        assert other in RANK, f"line {line}: {name} is taken from the top of the package, not from where it is defined"
        if RANK[other] >= RANK[own]:
            wrong.append(f"line {line}: {own} must not import {name}")
        elif own in LIBRARY and other not in LIBRARY:
            wrong.append(f"line {line}: {own} belongs to the library, {other} does not")
    assert not wrong, "\n".join(wrong)


# -------------------------------------------------------------------------------------------------------------- lengths
MAX_FILE, MAX_FUNCTION = 400, 60


def functions(tree: ast.AST) -> list[tuple[str, int]]:
    """Name and length of each function in lines, with its arguments and its docstring."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, node.end_lineno - node.lineno + 1) for node in ast.walk(tree) if isinstance(node, kinds)]


def test_no_file_is_long():
    lengths = {str(f.relative_to(PACKAGE)): len(f.read_text(encoding="utf-8").splitlines()) for f in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE} == {}


def test_no_function_is_long():
    lengths = {
        f"{path.relative_to(PACKAGE)}:{name}": lines
        for path in FILES
        for name, lines in functions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION} == {}
