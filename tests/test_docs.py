"""The documentation does not lie: its Python runs, its commands parse, its links lead somewhere, its options exist."""

import doctest
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from places import ROOT

from gpu_logicmix import GPULogicMix, cli, open_dataset
from gpu_logicmix.losses.base import LOSSES
from gpu_logicmix.methods.base import HEADS

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# What a snippet may take as given, because the reader has it.
SETUP = """
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
"""


def reader_has() -> dict:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 12))
    images, targets = torch.rand(8, 3, 32, 32), torch.randint(-1, 2, (8, 12))
    names = {"images": images, "targets": targets, "index": torch.arange(8), "logits": torch.randn(8, 12)}
    names |= {"model": model, "ema_model": model, "mix": GPULogicMix(), "loader": [(images, targets)]}
    names |= {"criterion": lambda logits, targets: logits.square().mean(), "device": "cpu", "epochs": 1}
    names |= {"epoch": 0, "categories": [f"category {c}" for c in range(12)]}
    names |= {"train_loader": [], "plain_loader": [(images, targets, torch.arange(8))], "start_epoch": 1}
    names |= {"features": torch.randn(8, 16), "test_features": torch.randn(8, 16), "test_targets": targets}
    names |= {"head": torch.nn.Linear(16, 12)}
    return names | {"dataset": open_dataset("shapes", "train", 32, count=16)}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_in_the_docs_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for registry in (LOSSES, HEADS):  # what a page registers is forgotten with it
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    # An example that is included from a file has a test of its own; a path of the reader's cannot be opened here.
    blocks = [b for b in BLOCK.findall(page.read_text(encoding="utf-8")) if "--8<--" not in b and "# your" not in b]
    names = reader_has() if blocks else {}
    exec(SETUP, names)
    for number, block in enumerate(blocks):
        code = block.replace('"cuda"', '"cpu"')
        code = re.sub(r'"(?:coco|voc2007|vg200|csv):[^"]*"', '"shapes"', code)
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


LIBRARY = ("labels", "metrics", "curriculum", "augment.logicmix", "augment.randaugment", "losses.asymmetric")


@pytest.mark.parametrize("name", LIBRARY)
def test_examples_in_docstrings_run(name):
    """Those of the API reference."""
    failed, tried = doctest.testmod(importlib.import_module(f"gpu_logicmix.{name}"))
    assert tried
    assert not failed


def test_the_readme_counts_right():
    text = README
    assert f"{len(LOSSES.names())} losses and {len(HEADS.names())} heads" in text
    assert len(text.splitlines()) <= 150


def test_the_readme_compares_by_what_was_measured():
    """Each column is of one run, and is what that run gave."""
    rows = {line.split("|")[1].strip(): line.split("|")[-3:-1] for line in README.splitlines() if line.startswith("| ")}
    results = ROOT / "bench" / "results"
    mix = json.loads((results / "mix.json").read_text())
    (row,) = (row for row in mix["rows"] if row["name"] == "32x3x448x448 float32 K 2-3 C 80")
    randaugment = json.loads((results / "randaugment.json").read_text())["sizes"][0]
    assert (mix["clock"], mix["environment"]["threads"]) == ("cpu", 1)
    assert (randaugment["batch"], randaugment["size"]) == (32, 448)
    for name, mixes, augments in (
        ("**GPU LogicMix**", ["GPULogicMix"], ["ours, uint8", "ours, float32"]),
        ("mlcpl (the authors')", ["mlcpl"], []),
        ("timm `Mixup`", ["timm batch", "timm elem"], []),
        ("torchvision v2 `MixUp`", ["torchvision"], ["torchvision v2, loop"]),
        ("Kornia `RandomMixUpV2`", ["Kornia"], ["Kornia, float32"]),
        ("DALI", [], ["DALI, CPU"]),
    ):
        said = [re.findall(r"\d+(?:\.\d+)?", cell) for cell in rows[name]]
        assert said[0] == [f"{row['methods'][method]['ms']:.1f}" for method in mixes]
        assert said[1] == [f"{randaugment['milliseconds'][method]:.0f}" for method in augments]


def test_every_command_is_in_the_docs():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in cli.COMMANDS if f"| `{name}` |" not in text] == []


def commands(page: Path) -> list[list[str]]:
    """Every command of ours in an indented block or a fence."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^(?:    |> ?)?(?:gpu-logicmix|python train\.py|torchrun .*?train\.py) +(\S.*)$", text, re.M)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_the_docs_parse(page):
    """Not run (they name data of the reader's), but every command and option exists."""
    for arguments in commands(page):
        if arguments[0].startswith("-"):
            assert arguments[0] in ("--help-method", "--help", "--version"), arguments
            continue
        command = cli.load_command(arguments[0])
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for argument in cli._with_value(arguments[1:]):
            if argument.startswith("--") or re.fullmatch(r"-[a-z]", argument):
                assert argument.partition("=")[0] in options, f"{' '.join(arguments)}: {argument}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_options_named_in_the_text_exist(page):
    known = {"--help", "--version", "--help-method", "--nproc_per_node", "--max-restarts", "--nnodes", "--resume"}
    for name in cli.COMMANDS:
        for parameter in cli.load_command(name).params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    of_scripts = {
        option
        for script in (
            *(ROOT / "bench").glob("*.py"),
            *(ROOT / "scripts").glob("*.py"),
            *(ROOT / "studies").glob("*.py"),
        )
        for option in re.findall(r'"(--[a-z-]+)"', script.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"`(--[a-z][a-z-]*)", page.read_text(encoding="utf-8")))
    assert named <= known | of_scripts


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
