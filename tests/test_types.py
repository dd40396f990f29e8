"""Public functions say what they take and return: `py.typed` promises it. Whether it is true, mypy checks."""

import ast

import pytest
from places import ROOT

FILES = sorted((ROOT / "gpu_logicmix").rglob("*.py"))


def _triton(function: ast.FunctionDef) -> bool:
    """Triton reads the arguments of its kernels itself: pointers and constants have no Python types."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def untyped(tree: ast.Module) -> list[str]:
    """Public functions, and methods of public classes, of which an argument or the result has no type."""
    found = []

    def look(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                look(child, f"{child.name}.")
            elif isinstance(child, (ast.If, ast.Try)):  # another definition for an older version
                look(child, within)
            elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_") and not _triton(child):
                given = child.args
                names = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                if within and not any(getattr(d, "id", "") == "staticmethod" for d in child.decorator_list):
                    names = names[1:]
                missing = [arg.arg for arg in names if arg is not None and arg.annotation is None]
                if child.returns is None:
                    missing.append("return")
                if missing:
                    found.append(f"line {child.lineno}, {within}{child.name}: {', '.join(missing)}")

    look(tree, "")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_public_functions_are_typed(file):
    assert untyped(ast.parse(file.read_text(encoding="utf-8"))) == []


def test_the_check_itself():
    code = "def f(a, *, b: int) -> None: ...\nclass C:\n  def g(self): ...\n  def _h(self, x): ...\n"
    assert untyped(ast.parse(code)) == ["line 1, f: a", "line 3, C.g: return"]
