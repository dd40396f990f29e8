"""The notebook runs from its first cell to its last in a kernel of its own, and is stored without outputs."""

import ast
import re

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT

BOOK = ROOT / "examples" / "quickstart.ipynb"


def test_outputs_are_stripped():
    for cell in nbformat.read(BOOK, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_every_epoch_has_an_order_of_its_own():
    """A loader counts its passes: one that is made anew starts with the same order again."""
    loops = [
        (loop, cell.source)
        for cell in nbformat.read(BOOK, as_version=4).cells
        if cell.cell_type == "code"
        for loop in ast.walk(ast.parse(cell.source))
        if isinstance(loop, ast.For)
    ]
    assert any(ast.get_source_segment(source, loop.iter) == "loader" for loop, source in loops)
    assert not [loop for loop, source in loops if "make_loader" in ast.get_source_segment(source, loop)]


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    book = nbformat.read(BOOK, as_version=4)
    NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "all of them right" in text
    first, last = map(float, re.search(r"loss (\S+) in the first epoch, (\S+) in the last", text).groups())
    assert last < 0.95 * first
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()
