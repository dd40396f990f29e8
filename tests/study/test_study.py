"""A study: which runs it has, that it can be stopped and split, and that its tables say what the runs gave."""

import io
import json
import re
import shutil
import signal
import statistics
from pathlib import Path
from xml.etree import ElementTree

import commands
import numpy as np
import PIL.Image
import pytest
import torch
from launch import Command, good, until
from places import ROOT
from rich.console import Console
from scipy import stats as scipy_stats
from sklearn.metrics import average_precision_score

from gpu_logicmix import GPULogicMix
from gpu_logicmix.study.curves import curve_plot, read_curves
from gpu_logicmix.study.pays import Point, gain_plot
from gpu_logicmix.study.plan import distinct, left_to_do, print_plan, read_study, run_study, study_hours
from gpu_logicmix.study.plots import plot_panels, standalone_plot
from gpu_logicmix.study.results import Row, collect, read_results, result
from gpu_logicmix.study.tables import cell, differences, known_words, markdown, markdown_table, t_quantile, tables
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
        ("[bse]\n", "unknown section [bse]"),
        ("[base]\n", "has no [[table]]"),
        ("[[table]]\ntitle='A'\n", "table 'A': has no [table.methods]"),
        ("[[table]]\n[table.methods]\nx = { mixx = 'none' }\n", "fit has no option 'mixx'"),
        ("[[table]]\nknown = 2.0\n[table.methods]\nx = { mix = 'none' }\n", "known=2: must be above 0"),
        ("[[table\n", "not TOML"),
        ("table = [1, 2]\n", "table 1: must be a section of options, not '1'"),
        ("base = 5\n[[table]]\n", "base: must be a section of options, not '5'"),
        ("title = 5\n[[table]]\n", "title: must be text in quotes, not '5'"),
        ("[[table]]\ntitle = [1]\n", "title: must be text in quotes"),
        ("[[table]]\nmethods = 3\n", "has no [table.methods]"),
        ("[[table]]\n[table.methods]\nx = 3\n", "'x': must be a section of options, not '3'"),
        ("[[table]]\nknown = 'all'\n[table.methods]\nx = {}\n", "'x': known='all': must be float"),
        ("[[table]]\nseed = [[1]]\n[table.methods]\nx = {}\n", "'x': seed=[1]: must be int"),
        ("[[table]]\nlr = { a = 1 }\n[table.methods]\nx = {}\n", "'x': lr={'a': 1}: must be float"),
        ("base = " + "[" * 100_000 + "\n", "tiny.toml"),
    ],
)
def test_mistakes_in_a_study_are_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read_study(write(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
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
    collect(planned, out)
    assert before == {file: file.stat().st_mtime_ns for file in out.glob("runs/*/last.pt")}
    # The tables are what the runs' own logs say.
    for plan, row in zip(planned, rows, strict=True):
        end = result(out / "runs" / plan.folder)
        assert row.mAP == pytest.approx(100 * end["mAP_cft" if plan.config.cft else "mAP"], abs=1e-4)
        assert (row.method, row.known, row.seed) == (plan.method, plan.known, plan.seed)
        assert row.known_measured == pytest.approx(plan.known, abs=0.05)
    assert (out / "results.md").read_text() == markdown(rows)
    page = (out / "index.html").read_text()
    assert "<h1>tiny</h1>" in page
    assert page.count('class="chart"') == 5  # two for each table, and the gain over known positives
    assert "http" not in page.replace("http-equiv", "")
    ElementTree.parse(out / "table1.svg")
    # The folders of runs go, results.csv stays: nothing is done again, nothing is lost.
    csv, page = (out / "results.csv").read_text(), (out / "index.html").read_text()
    shutil.rmtree(out / "runs")
    assert left_to_do(planned, out) == []
    assert run_study(planned, out) == []
    assert collect(planned, out) == rows
    assert (out / "results.csv").read_text() == csv
    assert not (out / "runs").exists()
    assert (out / "index.html").read_text() == page


def test_a_killed_study_goes_on_and_gives_the_same(tmp_path):
    text = TINY.replace("epochs = 2\n", "epochs = 4\n", 1).replace("seed = [0, 1]", "seed = [0]")
    text = text.replace('Mixup = { mix = "mixup", seed = [0] }\n', "")
    file = write(tmp_path, text)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    good(tmp_path, "study", file, "--out", whole)
    with Command(tmp_path, "study", file, "--out", killed) as study:
        until(lambda: len(list(killed.glob("runs/*/last.pt"))) >= 2, what="two runs")
        study.signal(signal.SIGKILL)
        study.process.join()
    assert len(read_results(killed / "results.csv")) < len(read_results(whole / "results.csv"))
    good(tmp_path, "study", file, "--out", killed)
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
    rows = [row._replace(mAP=row.mAP + {"a": 9, "b": -9}.get(row.method, 0)) for row in make_rows()]
    text = markdown(rows)
    assert text.count("↓") > 1  # and in the words below
    for known, column in ((0.1, 2), (0.5, 3)):
        means = {
            m: statistics.fmean(r.mAP for r in rows if r.method == m and r.known == known)
            for m in ("none", "a", "b", "c")
        }
        for m, mean in means.items():
            line = next(line for line in text.splitlines() if line.startswith(f"| {m} "))
            entry = line.split("|")[column].strip()
            assert f"{mean:.1f}" in entry
            gain = differences(rows).get((m, known))
            assert entry.startswith("**") == (gain is not None and gain.mean > gain.half)
            assert entry.endswith("↓") == (gain is not None and gain.mean < -gain.half)
            assert ("±" in entry) == (m != "c")
    single = markdown([row for row in rows if row.seed == 0])
    assert "**" not in single.replace("**T**", "")  # nothing tells the noise
    assert "↓" not in single
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


@pytest.mark.parametrize("freedom", [*range(1, 60), 99, 100, 1000])
def test_quantiles_of_students_t(freedom):
    for inside in (0.5, 0.95, 0.99):
        assert t_quantile(freedom, inside) == pytest.approx(scipy_stats.t.ppf((1 + inside) / 2, freedom), rel=1e-9)


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path):
    text = TINY.replace('LogicMix = { mix = "logicmix" }', 'wild = { mix = "none", lr = 1e30, log_every = 1 }')
    text = text.split("[[table]]")[0] + "[[table]]" + text.split("[[table]]")[1]
    planned = read_study(write(tmp_path, text.replace("seed = [0, 1]", "seed = [0]")))
    failed = run_study(planned, tmp_path / "out")
    assert len(failed) == 2
    assert all("wild" in line and ("no number" in line or "non-finite" in line) for line in failed)
    assert {row.method for row in read_results(tmp_path / "out" / "results.csv")} == {"none", "Mixup"}


def one_table(folder: Path, *methods: str) -> Path:
    """A study of these methods, at 90 % known."""
    base = TINY.split("[[table]]")[0]
    return write(folder, "\n".join([base, "[[table]]", "known = 0.9", "[table.methods]", *methods]))


def test_a_run_that_cannot_start_is_named_too(tmp_path):
    file = one_table(tmp_path, 'none = { mix = "none" }', 'lost = { mix = "none", init = "/nowhere/run" }')
    failed = run_study(read_study(file), tmp_path / "out")
    assert len(failed) == 1
    assert re.search(r"lost, known 0.9, seed 0: .*/nowhere/run", failed[0])
    assert {row.method for row in read_results(tmp_path / "out" / "results.csv")} == {"none"}


def test_methods_that_differ_in_what_they_start_from_are_runs_of_their_own(tmp_path):
    file = one_table(
        tmp_path,
        'scratch = { mix = "none" }',
        'pretrained = { mix = "none", weights = "hub" }',
        'init = { mix = "none", init = "runs/a" }',
        'other = { mix = "none", data = "csv:photos" }',
        'judged = { mix = "none", val = "csv:photos" }',
        'cft = { mix = "none", cft = true }',
        'long = { mix = "none", cft = true, cft_epochs = 9 }',
        'threads = { mix = "none", threads = 2 }',
    )
    planned = {plan.method: plan.folder for plan in read_study(file)}
    assert planned["scratch"] == planned["cft"] == planned["threads"]
    assert len(set(planned.values())) == 6
    # Wherever the data are on this machine.
    moved = read_study(file, data="csv:elsewhere")
    assert {plan.method: plan.folder for plan in moved} == planned


def plain_table(*lines: str, base: str = "") -> str:
    """A study of one table with two methods, known 0.9."""
    options = TINY.split("[[table]]")[0].replace("cft = false\n", "") + base
    return "\n".join(
        [options, "[[table]]", "known = 0.9", *lines, "[table.methods]", 'none = { mix = "none" }', "mixed = {}"]
    )


def photos(folder: Path, names: str = "abcd", sort: str = "png") -> Path:
    """A CSV of black images, of which the second half is to validate on."""
    folder.mkdir()
    for name in names:
        PIL.Image.new("RGB", (32, 32)).save(folder / f"{name}.{sort}")
    lines = [f"{n}.{sort},{'val' if i >= len(names) // 2 else 'train'},1,0" for i, n in enumerate(names)]
    (folder / "t.csv").write_text("\n".join(["image,split,x,y", *lines, ""]))
    return folder / "t.csv"


def test_results_count_where_the_data_was_moved_to_and_not_for_other_data(tmp_path):
    one, other = photos(tmp_path / "one"), photos(tmp_path / "other", "abcdefgh")
    text = plain_table(base="cft = false\n").replace('data = "shapes"\noption = ["count=16"]', f'data = "csv:{one}"')
    file, out = write(tmp_path, text.replace("batch_size = 8", "batch_size = 2")), tmp_path / "out"
    assert commands.run("study", file, "--out", out)[0] == 0
    before = (out / "results.csv").read_text()
    (tmp_path / "one").rename(tmp_path / "moved")
    moved = f"csv:{tmp_path}/moved/t.csv"
    assert "2 of 2 runs are finished" in commands.run("study", file, "--out", out, "--data", moved)[1]
    for rest in ((), ("--plan",), ("--only-report",)):
        code, text = commands.run("study", file, "--out", out, "--data", f"csv:{other}", *rest)
        assert code == 1
        assert "is finished, with 2 images and 1 known positives" in text
        assert "has 4 and 2: other data; choose another --out" in text
    # Where it is not at all, the results are still there; and that nothing was compared is said.
    code, text = commands.run("study", file, "--out", out)
    assert code == 0
    assert "not compared with the data" in text
    assert "2 of 2 runs are finished" in text
    # From scratch or not, also when the folders are gone.
    shutil.rmtree(out / "runs")
    code, text = commands.run("study", file, "--out", out, "--data", moved, "--weights", "hub")
    assert code == 1
    assert "began with --weights none, not --weights hub; choose another --out" in text
    assert (out / "results.csv").read_text() == before


def test_other_options_need_another_folder(tmp_path):
    """A cell with runs from before and after a change would look like a method with more seeds."""
    planned = read_study(write(tmp_path, plain_table("seed = [0, 1]", base="cft = false\n")))
    for plan in distinct(planned):
        fake_run(tmp_path, plan)
    collect(planned, tmp_path)
    before = (tmp_path / "results.csv").read_text()
    later = read_study(write(tmp_path, plain_table("seed = [0, 1]", "epochs = 3", base="cft = false\n")))
    for call in (left_to_do, collect):
        with pytest.raises(ValueError, match=r"4 lines are of runs with other options .* 'none', known 0.9, seed 0"):
            call(later, tmp_path)
    assert (tmp_path / "results.csv").read_text() == before
    (tmp_path / "results.csv").unlink()
    assert len(left_to_do(later, tmp_path)) == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("known = 0.9", "known = 0.9\nseed = [0, 0]"),
        ("known = 0.9", "known = [0.9, 0.9]"),
        ("[[table]]", "[[table]]\ntitle = 'Table 2'\n[table.methods]\nnone = { known = 0.9 }\n[[table]]"),
    ],
)
def test_a_run_that_is_there_twice(tmp_path, before, after):
    with pytest.raises(ValueError, match=r"'none': known 0.9, seed 0 is there 2 times"):
        read_study(write(tmp_path, plain_table().replace(before, after)))


def test_fine_tuning_switched_on_or_off_later(tmp_path):
    without = read_study(write(tmp_path, plain_table(base="cft = false\n")))
    tuned = read_study(write(tmp_path, plain_table(base="cft = true\n")))
    for plan in without:
        fake_run(tmp_path, plan)
    collect(without, tmp_path)
    assert len(left_to_do(tuned, tmp_path)) == 2  # their folders can be resumed
    assert collect(tuned, tmp_path) == []
    for plan in without:
        shutil.rmtree(tmp_path / "runs" / plan.folder)
        fake_run(tmp_path, plan, mAP_cft=0.6)
    assert {row.mAP for row in collect(tuned, tmp_path)} == {60.0}
    shutil.rmtree(tmp_path / "runs")
    assert left_to_do(tuned, tmp_path) == []
    assert {row.mAP for row in collect(tuned, tmp_path)} == {60.0}
    assert {row.mAP for row in collect(without, tmp_path)} == {50.0}
    # Without a folder, what was not fine-tuned cannot be.
    with pytest.raises(ValueError, match="2 lines are of runs with other options"):
        left_to_do(tuned, tmp_path)


def test_a_head_that_cannot_be_fine_tuned_counts_as_it_is(tmp_path):
    """cft is on unless a study says otherwise."""
    planned = read_study(write(tmp_path, plain_table(base="cft = true\n")))
    for plan in planned:
        fake_run(tmp_path, plan, options={"cft": True})
    assert {row.mAP for row in collect(planned, tmp_path)} == {50.0}
    shutil.rmtree(tmp_path / "runs")
    assert left_to_do(planned, tmp_path) == []
    assert len(collect(planned, tmp_path)) == 2


def test_results_that_are_no_text_are_named(tmp_path):
    (tmp_path / "results.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"results.csv: not UTF-8 text"):
        read_results(tmp_path / "results.csv")


@pytest.mark.parametrize("line", ["r,2", "r,two,3", "r,2,nan", "r,2,3,4"])
def test_a_line_of_curves_that_cannot_be_read_is_named(tmp_path, line):
    (tmp_path / "curves.csv").write_text(f"run,epoch,mAP\nr,1,2.5\n{line}\n")
    with pytest.raises(ValueError, match=r"curves.csv, line 3: .*; remove the line"):
        read_curves(tmp_path)
    (tmp_path / "curves.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"curves.csv: not UTF-8 text"):
        read_curves(tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_result_that_is_no_number_is_named(tmp_path, value):
    (tmp_path / "results.csv").write_text(f"table,method,known,seed,mAP,run\nT,m,0.5,0,{value},r\n")
    with pytest.raises(ValueError, match=rf"results.csv, line 2: {value} is not a finite number; remove the line"):
        read_results(tmp_path / "results.csv")


def fake_run(out: Path, plan, mAP: float | None = 0.5, **end) -> None:
    """A finished run as its log tells it."""
    folder = out / "runs" / plan.folder
    folder.mkdir(parents=True)
    epochs = [
        {"kind": "epoch", "epoch": e, "mAP": m, "CF1": 0.1, "OF1": 0.2, **({"tune_mAP": t} if t else {})}
        for e, m, t in ((1, 0.4, 0.3), (2, 0.45, 0.35), (3, None, None), (4, mAP, 0.32))
    ]
    last = {"kind": "end", "mAP": mAP, "mAP_best": mAP, "elapsed": 60.0, **end}
    start = {"kind": "start", "known": plan.known / 2, "images": 16, "category_positives": [1, 9, 4, 4]}
    lines = [start, *epochs, last]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_measured_share_and_the_epoch_chosen_by_training_images(tmp_path):
    planned = [plan for plan in read_study(write(tmp_path)) if plan.table == "Ways to mix"]
    for plan in planned:
        fake_run(tmp_path, plan, 0.5 + 0.01 * plan.seed)
    rows = collect(planned, tmp_path)
    assert {row.known_measured for row in rows} == {0.15, 0.45}
    assert {(row.images, row.positives) for row in rows} == {(16, 4.0)}
    assert {row.mAP_tuned for row in rows} == {45.0}  # epoch 2 has the best mAP of held-out training images
    text = (tmp_path / "results.md").read_text()
    assert "| mAP (%) | 15% known | 45% known | average |" in text
    assert "| mAP (%), chosen epoch | 15% known |" in text
    assert rows == read_results(tmp_path / "results.csv")
    # A file from before these columns, and one with a line that cannot be read.
    old = "".join(",".join(line.split(",")[:-5]) + "\n" for line in (tmp_path / "results.csv").read_text().splitlines())
    (tmp_path / "results.csv").write_text(old)
    new = {"mAP_tuned": None, "known_measured": None, "images": None, "positives": None}
    assert read_results(tmp_path / "results.csv") == [r._replace(**new) for r in rows]
    (tmp_path / "results.csv").write_text(old.replace(",0.3,0,", ",0.3,zero,", 1))
    with pytest.raises(ValueError, match=r"results.csv, line 2: .*zero"):
        read_results(tmp_path / "results.csv")


def test_headings_of_known_proportions():
    def words(known, measured):
        return known_words([Row("T", "m", known, 0, 1, 1, 1, 1, 1, 1, 1, "r", None, measured)], known)

    assert words(0.5, 0.5003) == "50% known"
    assert words(0.5, 0.2503) == "25% known"
    assert words(0.025, 0.0249) == "2.5% known"
    assert words(1.0, 1.0) == "100% known"
    assert words(1.0, 0.0125) == "1.2% known"  # one positive label per image
    assert words(0.1, None) == "10% known"
    assert words(50.0, 0.031) == "50 per class, 3.1% known"


def test_a_run_without_mAP_is_a_dash(tmp_path):
    """Validation images without a known positive."""
    planned = [plan for plan in read_study(write(tmp_path)) if plan.table == "Ways to mix"]
    for plan in planned:
        fake_run(tmp_path, plan, None if plan.method == "Mixup" else 0.5)
    rows = collect(planned, tmp_path)
    assert len(rows) == len(planned)
    assert [row.mAP for row in rows if row.method == "Mixup"] == [None, None]
    assert "| Mixup | – | – | – |" in (tmp_path / "results.md").read_text()
    assert left_to_do(planned, tmp_path) == []
    for plan in planned:
        shutil.rmtree(tmp_path / "runs" / plan.folder)
        fake_run(tmp_path, plan, None)
    assert all(row.mAP is None for row in collect(planned, tmp_path))
    assert "No run has an mAP" in (tmp_path / "results.md").read_text()


def test_validation_without_a_positive_label(tmp_path):
    """The real thing: every category is unknown or absent in all validation images."""
    for name in ("a", "b"):
        PIL.Image.new("RGB", (32, 32)).save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image,split,x,y\na.png,train,1,0\nb.png,val,0,0\n")
    text = TINY.split("[[table]]")[0].replace('option = ["count=16"]\n', "").replace("shapes", f"csv:{tmp_path}/t.csv")
    text += "[[table]]\nseed = 0\n[table.methods]\nnone = { mix = 'none', batch_size = 1 }\n"
    planned = read_study(write(tmp_path, text))
    assert run_study(planned, tmp_path / "out") == []
    assert [row.mAP for row in collect(planned, tmp_path / "out")] == [None]


def test_lines_of_other_runs_stay(tmp_path):
    planned = read_study(write(tmp_path))
    for plan in distinct(planned):
        fake_run(tmp_path, plan, mAP_cft=0.55)
    rows = collect(planned, tmp_path)
    shutil.rmtree(tmp_path / "runs")
    # The study loses a method and another one gets a new name.
    text = TINY.replace('Mixup = { mix = "mixup", seed = [0] }\n', "").replace("LogicMix = {", '"Logic Mix" = {')
    fewer = read_study(write(tmp_path, text))
    assert left_to_do(fewer, tmp_path) == []
    after = collect(fewer, tmp_path)
    assert [row for row in after if row.method == "Mixup"] == [row for row in rows if row.method == "Mixup"]
    assert {row.method for row in after} == {"none", "Logic Mix", "LogicMix and CFT", "Mixup"}
    assert {row.mAP for row in after if row.method == "LogicMix and CFT"} == {55.0}
    assert {row.mAP for row in after if row.method == "Logic Mix"} == {50.0}


HOSTILE = ["<script>alert(1)</script>", "$\\frac$ [red]x[/] [/nope]", "a | b * c"]


def test_hostile_names_stay_text(tmp_path):
    names = [json.dumps(name) for name in HOSTILE]
    text = TINY.split("[[table]]")[0] + f"[[table]]\ntitle = {names[0]}\nseed = [0, 1]\n[table.methods]\n"
    text += "".join(
        f"{name} = {{ mix = {mix!r} }}\n" for name, mix in zip(names, ("none", "logicmix", "mixup"), strict=True)
    )
    planned = read_study(write(tmp_path, f"title = {names[1]}\n{text}"))
    for plan in planned:
        fake_run(tmp_path, plan, 0.5 + 0.1 * plan.seed)
    rows = collect(planned, tmp_path)
    assert {row.method for row in rows} == set(HOSTILE)
    for file in ("results.md", "index.html", "table1.svg"):
        assert "<script>alert" not in (tmp_path / file).read_text()
    page = (tmp_path / "index.html").read_text()
    assert page.count("<script>") == 1
    assert f"<h1>{HOSTILE[1]}</h1>" in page
    assert "| a \\| b \\* c |" in (tmp_path / "results.md").read_text()
    ElementTree.parse(tmp_path / "table1.svg")
    console = Console(width=200, record=True, file=io.StringIO())
    print_plan(planned, tmp_path, console)
    screen = console.export_text()
    assert all(name in screen for name in HOSTILE)


def test_hours_of_a_study(tmp_path):
    planned = read_study(write(tmp_path))
    whole, left = study_hours(planned, tmp_path, 2.0)
    runs = distinct(planned)
    # 16 images to train on and 16 to validate on, two epochs.
    assert whole == left == pytest.approx(len(runs) * 2 * (16 + 16) / 2 / 3600)
    fake_run(tmp_path, runs[0], mAP_cft=0.5)
    assert study_hours(planned, tmp_path, 2.0)[1] == pytest.approx(whole * (len(runs) - 1) / len(runs))
    with pytest.raises(ValueError, match="images_per_second=0: must be above 0"):
        study_hours(planned, tmp_path, 0)


def test_plots_have_room_for_every_interval(tmp_path):
    rows = [row._replace(mAP=row.mAP + 20 * (row.method == "a") * row.seed) for row in make_rows(2)]
    for part in (rows, [row for row in rows if row.known == 0.1]):
        panels, _ = plot_panels(part)
        assert len(panels) == 2
        assert any(mark.half > 5 for mark in panels[1].marks)
        for panel in panels:
            places = [float(v) for v in re.findall(r'(?:x|y|x1|x2|y1|y2|cx|cy)="([-\d.]+)"', panel.content)]
            paths = " ".join(re.findall(r'd="(M[^"]*)"', panel.content))
            places += [float(v) for v in re.findall(r"[MHVL ](-?[\d.]+)", paths)]
            assert min(places) >= 0
            assert max(places) <= 360


def test_long_names_fit_into_a_plot_of_its_own():
    """An SVG cuts what is wider than it is; a page wraps it."""
    long = "no mixing at all, which is the plain training of the paper"
    rows = [row._replace(method=row.method.replace("none", long)) for row in make_rows()]
    curves = {row.run: {1: 1.0, 2: 2.0} for row in rows if row.known == 0.1}
    points = [Point("S", long, 0.5, 1, x, [1.0]) for x in (5.0, 50.0)]
    for text in (curve_plot(rows, curves), gain_plot(points)):
        assert ">no mixing at all, which is the plain training …<" in text
        assert f">{long}<" not in text
    assert "Difference to no mixing at all,… in points, 95 % interval<" in standalone_plot(rows)


def test_runs_are_linked_where_their_reports_are(tmp_path):
    planned = [plan for plan in read_study(write(tmp_path)) if plan.table == "Ways to mix"]
    for plan in planned:
        fake_run(tmp_path, plan)
    (tmp_path / "runs" / planned[0].folder / "report.html").write_text("a report")
    collect(planned, tmp_path)
    links = re.findall(r'href="(.*?)"', (tmp_path / "index.html").read_text())
    assert links == [f"runs/{planned[0].folder}/report.html"]


def committed() -> list[Path]:
    return sorted((ROOT / "studies").glob("results/*/results.csv"))


@pytest.mark.parametrize("file", committed(), ids=lambda file: file.parent.name)
def test_committed_tables_come_from_the_committed_results(file):
    rows = read_results(file)
    assert rows
    assert all(row.mAP is not None for row in rows)
    assert (file.parent / "results.md").read_text() == markdown(rows)
    shown = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for table in tables(rows):
        for block in table.blocks:
            assert markdown_table(block) in shown, (
                f"docs: other figures than {table.title!r} of {file}; make study-docs"
            )


def test_the_docs_are_up_to_date_with_the_results(script, capsys):
    """Tables, sentences and plots made from results.csv, and what `stats` and `fit` hint by."""
    assert script("scripts/study_docs.py").main(["--check"]) == 0, f"make study-docs: {capsys.readouterr().out}"


@pytest.mark.parametrize("file", sorted((ROOT / "studies").glob("*.toml")), ids=lambda file: file.stem)
def test_committed_studies_can_be_read_and_planned(file, tmp_path):
    planned = read_study(file)
    console = Console(width=250, record=True, file=io.StringIO())
    here = not planned[0].config.data.startswith("coco:../shared")
    print_plan(planned, tmp_path, console, 1000.0 if here else None)
    text = console.export_text()
    assert all(plan.folder in text for plan in planned)
    if here:
        assert re.search(r"\d+ runs: \d+\.\d hours at 1000 images/s", text)
    for name in planned[0].uses:
        assert (ROOT / "studies" / f"{name}.toml").exists()


def test_hours_of_a_paper_table_without_its_data(tmp_path):
    """60 epochs of COCO's 82,783 images in batches of 32, 40,504 to validate on after each, 18 runs."""
    planned = read_study(ROOT / "studies" / "paper-mixes.toml", data=f"coco:{tmp_path}/nowhere")
    whole, _ = study_hours(planned, tmp_path, 100.0)
    assert whole == pytest.approx(18 * 60 * (82_783 // 32 * 32 + 40_504) / 100 / 3600)


def test_runs_judged_by_mixed_images(tmp_path, script):
    only = TINY[: TINY.index("[[table]]")] + '[[table]]\nseed = 0\n[table.methods]\nnone = { mix = "none" }\n'
    run_study(read_study(write(tmp_path, only)), tmp_path / "out")
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    found = tmp_path / "mixed.json"
    script("studies/mixed_images.py").main([folder], threads=1, out=found)
    (row,) = json.loads(found.read_text())
    assert row["mAP1"] == pytest.approx(100 * result(folder)["mAP"], abs=0.01)  # single images: what fit said
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
