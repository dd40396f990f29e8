"""A study: which runs it has, that it can be stopped and split, and that its tables say what the runs gave."""

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from scipy import stats as scipy_stats
from sklearn.metrics import average_precision_score

from gpu_logicmix import GPULogicMix
from gpu_logicmix.study import plan as study
from gpu_logicmix.study.plan import Row, cell, differences, distinct, markdown, read_results, read_study, run_study
from gpu_logicmix.train.inputs import open_val
from gpu_logicmix.train.predict import load_run

TINY = """
[base]
data = "shapes"
option = ["count=16"]
size = 32
model = "test_resnet"
weights = "none"
head = "linear"
epochs = 2
batch_size = 8
accumulate = 1
lr = 1e-3
threads = 1
workers = 0
cl = false
cft = false
cft_epochs = 2

[[table]]
title = "Ways to mix"
known = [0.3, 0.9]
seed = [0, 1]
[table.methods]
none = { mix = "none" }
LogicMix = { mix = "logicmix" }
Mixup = { mix = "mixup", seed = [0] }

[[table]]
title = "Parts"
known = 0.3
seed = [0, 1]
[table.methods]
none = { mix = "none" }
"LogicMix and CFT" = { mix = "logicmix", cft = true }
"""


def write(folder: Path, text: str = TINY) -> Path:
    file = folder / "tiny.toml"
    file.write_text(text)
    return file


def test_the_runs_of_a_study(tmp_path):
    planned = read_study(write(tmp_path))
    assert len(planned) == 4 + 4 + 2 + 2 + 2
    assert {plan.config.keep for plan in planned} == {"last"}  # nothing is chosen on the images it is judged by
    runs = distinct(planned)
    assert len(runs) == 4 + 4 + 2  # tables share runs, and fine-tuning does not train again
    assert [plan.seed for plan in runs] == sorted(plan.seed for plan in runs)
    tuned = [plan for plan in runs if plan.config.cft]
    assert [(plan.config.mix, plan.known, plan.seed) for plan in tuned] == [("logicmix", 0.3, 0), ("logicmix", 0.3, 1)]
    assert len({plan.folder for plan in runs}) == len(runs)
    # A path or a number of threads is no part of what is computed.
    other = read_study(write(tmp_path), threads=2, cache="elsewhere")
    assert [plan.folder for plan in other] == [plan.folder for plan in planned]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[bse]\n", "no section [bse]"),
        ("[base]\n", "has no [[table]]"),
        ("[[table]]\ntitle='A'\n", "table 'A': has no [table.methods]"),
        ("[[table]]\n[table.methods]\nx = { mixx = 'none' }\n", "fit has no option 'mixx'"),
        ("[[table]]\nknown = 2.0\n[table.methods]\nx = { mix = 'none' }\n", "known=2: must be above 0"),
        ("[[table\n", "not TOML"),
    ],
)
def test_mistakes_in_a_study_are_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_study(write(tmp_path, text))


def test_a_study_from_start_to_end(tmp_path):
    planned = read_study(write(tmp_path))
    out = tmp_path / "out"
    assert run_study(planned, out, shard=(0, 2)) == []
    half = read_results(out / "results.csv")
    assert run_study(planned, out, shard=(1, 2)) == []
    rows = read_results(out / "results.csv")
    assert 0 < len(half) < len(rows) == len(planned)
    before = {file: file.stat().st_mtime_ns for file in out.glob("runs/*/last.pt")}
    assert run_study(planned, out) == []  # everything is there: nothing is done again
    study.collect(planned, out)
    assert before == {file: file.stat().st_mtime_ns for file in out.glob("runs/*/last.pt")}
    # The tables are what the runs' own logs say.
    for plan, row in zip(planned, rows, strict=True):
        end = study.result(out / "runs" / plan.folder)
        assert row.mAP == pytest.approx(100 * end["mAP_cft" if plan.config.cft else "mAP"], abs=1e-4)
        assert (row.method, row.known, row.seed) == (plan.method, plan.known, plan.seed)
    assert (out / "results.md").read_text() == markdown(rows)
    page = (out / "index.html").read_text()
    assert page.count("<img") == 2
    assert "http" not in page.replace("http-equiv", "")
    assert (out / "table1.png").stat().st_size > 10_000


def test_a_killed_study_goes_on_and_gives_the_same(tmp_path):
    text = TINY.replace("epochs = 2\n", "epochs = 6\n", 1).replace("seed = [0, 1]", "seed = [0]")
    text = text.replace('Mixup = { mix = "mixup", seed = [0] }\n', "")
    file = write(tmp_path, text)
    command = [sys.executable, str(ROOT / "train.py"), "study", str(file), "--out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, str(whole)], check=True, env=environment, capture_output=True)
    process = subprocess.Popen([*command, str(killed)], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and len(list(killed.glob("runs/*/last.pt"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_results(killed / "results.csv")) < len(read_results(whole / "results.csv"))
    subprocess.run([*command, str(killed)], check=True, env=environment, capture_output=True)
    without_time = [row._replace(minutes=0) for row in read_results(whole / "results.csv")]
    assert [row._replace(minutes=0) for row in read_results(killed / "results.csv")] == without_time


def make_rows(seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row("T", method, known, s, round(float(rng.normal(30, 2)), 4), 0, 0, 0, 0, 1, 1.0, f"{method}{known}{s}")
        for method, seeds in (("none", 4), ("a", 4), ("b", 3), ("c", 1))
        for known in (0.1, 0.5)
        for s in range(seeds)
    ]


def test_the_table_against_the_obvious_way():
    rows = make_rows()
    text = markdown(rows)
    for known, column in ((0.1, 2), (0.5, 3)):
        means = {
            m: statistics.fmean(r.mAP for r in rows if r.method == m and r.known == known)
            for m in ("none", "a", "b", "c")
        }
        for m, mean in means.items():
            line = next(line for line in text.splitlines() if line.startswith(f"| {m} "))
            entry = line.split("|")[column].strip()
            assert f"{mean:.1f}" in entry
            assert entry.startswith("**") == (mean == max(means.values()))
            assert entry.endswith("↓") == (mean < means["none"])
            assert ("±" in entry) == (m != "c")
    assert cell([]) is None
    assert cell([3.0]).text == "3.0"


def test_confidence_intervals_against_scipy():
    rows = make_rows(1)
    mAP = {(r.method, r.known, r.seed): r.mAP for r in rows}
    pairs = {
        (m, k): np.array([mAP[m, k, s] - mAP["none", k, s] for s in range(seeds)])
        for m, seeds in (("a", 4), ("b", 3), ("c", 1))
        for k in (0.1, 0.5)
    }
    found = differences(rows)
    assert found.keys() == pairs.keys()
    # The slow way: deviations of each group from its own mean, all together.
    residuals = np.concatenate([v - v.mean() for v in pairs.values()])
    freedom = len(residuals) - len(pairs)
    sigma = np.sqrt((residuals**2).sum() / freedom)
    for key, values in pairs.items():
        assert found[key].values == pytest.approx(values)
        low, high = scipy_stats.t.interval(0.95, freedom, values.mean(), sigma / np.sqrt(len(values)))
        assert (found[key].mean - found[key].half, found[key].mean + found[key].half) == pytest.approx(
            (low, high), abs=2e-3
        )
    # One method alone: scipy's paired test.
    alone = [r for r in rows if r.method in ("none", "a") and r.known == 0.1]
    (only,) = differences(alone).values()
    values = pairs["a", 0.1]
    interval = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (only.mean - only.half, only.mean + only.half) == pytest.approx(tuple(interval), abs=2e-3)
    assert differences([r for r in rows if r.seed == 0])["a", 0.1].half is None  # nothing to tell the noise by
    assert ("a", 0.1) not in differences([r for r in rows if (r.method == "none") == (r.seed == 0)])
    for df, value in enumerate(study.T95, 1):
        assert value == pytest.approx(scipy_stats.t.ppf(0.975, df), abs=1e-3)


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path):
    text = TINY.replace('LogicMix = { mix = "logicmix" }', 'wild = { mix = "none", lr = 1e30, log_every = 1 }')
    text = text.split("[[table]]")[0] + "[[table]]" + text.split("[[table]]")[1]
    planned = read_study(write(tmp_path, text.replace("seed = [0, 1]", "seed = [0]")))
    failed = run_study(planned, tmp_path / "out")
    assert len(failed) == 2
    assert all("wild" in line and "no number" in line for line in failed)
    assert {row.method for row in read_results(tmp_path / "out" / "results.csv")} == {"none", "Mixup"}


def committed() -> list[Path]:
    return sorted((ROOT / "studies").glob("results/*/results.csv"))


@pytest.mark.parametrize("file", committed(), ids=lambda file: file.parent.name)
def test_committed_tables_come_from_the_committed_results(file):
    rows = read_results(file)
    assert rows
    assert all(math.isfinite(row.mAP) for row in rows)
    assert (file.parent / "results.md").read_text() == markdown(rows)
    shown = (ROOT / "docs" / "study.md").read_text()
    for table in study.tables(rows):
        for part in (table.rows, table.gains):
            lines = [f"| {' | '.join(row)} |" for row in part]
            assert "\n".join(lines) in shown, f"docs/study.md: other figures than {table.title!r} of {file}"


@pytest.mark.parametrize("file", sorted((ROOT / "studies").glob("*.toml")), ids=lambda file: file.stem)
def test_committed_studies_can_be_read(file):
    assert read_study(file)


def test_runs_judged_by_mixed_images(tmp_path, script):
    only = TINY[: TINY.index("[[table]]")] + '[[table]]\nseed = 0\n[table.methods]\nnone = { mix = "none" }\n'
    run_study(read_study(write(tmp_path, only)), tmp_path / "out")
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    found = tmp_path / "mixed.json"
    script("studies/mixed_images.py").main([folder], threads=1, out=found)
    (row,) = json.loads(found.read_text())
    assert row["mAP1"] == pytest.approx(100 * study.result(folder)["mAP"], abs=0.01)  # single images: what fit said
    # K = 2, the slow way: the same pairs, image by image.
    config, model, *_ = load_run(folder)
    val = open_val(config)
    members = GPULogicMix(1.0, 2, 2, generator=torch.Generator().manual_seed(0)).plan(len(val)).index
    images, labels, _ = val[list(range(len(val)))]
    means = [(images[a].double() + images[b]) / 510 for a, b in members.tolist()]
    either = [labels[a] | labels[b] for a, b in members.tolist()]
    with torch.no_grad():
        scores = torch.cat([model(mean.float()[None]) for mean in means])
    wanted = statistics.fmean(
        average_precision_score(truth, score)
        for truth, score in zip(torch.stack(either).T.numpy(), scores.T.numpy(), strict=True)
        if truth.any()
    )
    assert row["mAP2"] == pytest.approx(100 * wanted, abs=0.02)
