"""Where LogicMix pays: points, line, interval and hint, and what the docs say of them."""

import json
import re
import statistics
from xml.etree import ElementTree

import numpy as np
import pytest
from places import ROOT, SHARED
from scipy import stats as scipy_stats

from gpu_logicmix.study.curves import curve_plot, mean_curve
from gpu_logicmix.study.pays import Point, gain_line, gain_plot, gain_points
from gpu_logicmix.study.plan import distinct, read_study
from gpu_logicmix.study.results import Row, read_results, write_results
from gpu_logicmix.train import hint
from gpu_logicmix.train.inputs import label_counts_of, open_train


def row(method, known, seed, mAP, positives, table="T", run=None):
    name = run or f"{table}-{method}-{known}-{seed}"
    return Row(table, method, known, seed, mAP, mAP, mAP, 0, 0, 1, 1.0, name, None, known, 100, positives)


def test_pairs_become_points():
    rows = [
        row("none", 0.1, 0, 10.0, 5),
        row("none", 0.1, 1, 12.0, 7),
        row("none", 0.9, 0, 20.0, 50),
        row("LogicMix", 0.1, 0, 9.0, 5),
        row("LogicMix", 0.1, 1, 12.5, 7),
        row("LogicMix", 0.9, 0, 24.0, 50),
        row("LogicMix", 0.9, 1, 30.0, 50),  # no run without mixing has this seed
        row("Mixup", 0.9, 0, 99.0, 50),
    ]
    points = gain_points([("S", rows)])
    assert points == [Point("S", "T", 0.1, 100, 6.0, [-1.0, 0.5]), Point("S", "T", 0.9, 100, 50.0, [4.0])]
    # The same runs in another table, or another study, count once; so do lines without the number of positives.
    again = [r._replace(table="again") for r in rows]
    assert gain_points([("S", rows + again), ("other", again)]) == points
    assert gain_points([("S", [r._replace(positives=None) for r in rows])]) == []


def random_points(seed, count=9, slope=5.0):
    rng = np.random.default_rng(seed)
    xs = 10 ** rng.uniform(0.5, 3, count)
    return [Point("S", "T", 0.5, 1, x, [slope * np.log10(x) - 8 + rng.normal()]) for x in xs]


@pytest.mark.parametrize("seed", range(4))
def test_the_line_against_scipy(seed):
    points = random_points(seed)
    line = gain_line(points)
    x, y = np.log10([p.positives for p in points]), np.array([p.gain for p in points])
    fit = scipy_stats.linregress(x, y)
    assert line.slope == pytest.approx(fit.slope)
    assert line.crossing() == pytest.approx(10 ** (-fit.intercept / fit.slope))
    # The interval of the mean, the slow way: (X'X)^-1.
    design = np.stack((np.ones_like(x), x), 1)
    rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    covariance = np.linalg.inv(design.T @ design) * (rest @ rest) / (len(x) - 2)
    for at in (3.0, 40.0, 700.0):
        place = np.array([1, np.log10(at)])
        half = scipy_stats.t.ppf(0.975, len(x) - 2) * np.sqrt(place @ covariance @ place)
        value, own = line.at(at)
        assert (value, own) == pytest.approx((fit.intercept + fit.slope * np.log10(at), half), rel=1e-6)
    # At its limits the interval touches 0.
    low, high = line.limits()
    assert low < line.crossing() < high
    for at, sign in ((low, 1), (high, -1)):
        value, half = line.at(at)
        assert value + sign * half == pytest.approx(0, abs=1e-6)


def test_few_points():
    points = random_points(0)
    assert gain_line(points[:1]) is None
    two = gain_line(points[:2])
    assert two.noise is None
    assert two.limits() is None
    assert two.at(points[0].positives) == (pytest.approx(points[0].gain), None)
    flat = [p._replace(gains=[g]) for p, g in zip(points, [1, -1, 1, -1, 1, -1, 1, -1, 1], strict=True)]
    assert gain_line(flat).limits() is None  # the slope is within the noise
    falling = [p._replace(gains=[-p.gain]) for p in points]
    assert gain_line(falling).crossing() is None
    for some in (points[:1], points[:2], points):
        ElementTree.fromstring(gain_plot(some))
    names = [p._replace(study=f"<{n}>") for n, p in enumerate(points)]
    assert "&lt;3&gt;" in gain_plot(names)


def test_the_plot_shows_every_pair_within_its_axes():
    points = [p._replace(gains=[p.gain - 3, p.gain + 3]) for p in random_points(1)]
    text = gain_plot(points)
    assert text.count('class="run ') == 2 * len(points)
    assert text.count('class="band"') == 1
    inside = text[text.rindex("<g transform") :]
    ys = [float(v) for v in re.findall(r'cy="([-\d.]+)"', inside)] + [
        float(pair.split(",")[1]) for pair in re.search(r'points="([^"]+)"', inside)[1].split()
    ]
    assert min(ys) >= 12
    assert max(ys) <= 176


def test_a_study_writes_the_plot_where_its_settings_differ(tmp_path):
    from gpu_logicmix.study.results import csv

    def write(rows):
        with open(tmp_path / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows([Row._fields, *rows])
        write_results(tmp_path)

    same = [row("none", 0.1, 0, 10.0, 5), row("LogicMix", 0.1, 0, 9.0, 5)]
    write(same)
    assert not (tmp_path / "gain.svg").exists()
    write([*same, row("none", 0.9, 0, 20.0, 50), row("LogicMix", 0.9, 0, 24.0, 50)])
    ElementTree.parse(tmp_path / "gain.svg")
    assert "Gain over known positives" in (tmp_path / "index.html").read_text()


def test_curves_of_seeds():
    assert mean_curve([{1: 1.0, 2: 2.0}, {2: 4.0, 3: 5.0}]) == {2: 3.0}
    rows = [row(m, k, s, 1.0, 5) for m in ("none", "LogicMix") for k in (0.1, 0.9) for s in (0, 1)]
    curves = {r.run: {1: 10.0, 2: 20.0 + r.seed} for r in rows if r.known == 0.9}
    text = curve_plot(rows, curves)
    ElementTree.fromstring(text)
    assert text.count("90% known") == 1
    assert "10% known" not in text  # no run of these has a curve
    assert text.count('class="thin ') == 4
    assert curve_plot(rows, {}) is None


@pytest.mark.parametrize(
    ("positives", "words"),
    [
        ([3, 9, 9, 400], "9 known positives per category (median): mixing is unlikely to help"),
        ([40] * 3, "40 known positives per category (median): mixing may help or not"),
        (
            [9, 1000, 2000],
            "1,000 known positives per category (median): enough for mixing to help where plain training",
        ),
    ],
)
def test_the_hint(positives, words, monkeypatch):
    monkeypatch.setattr(hint, "evidence", lambda: {"low": 25.0, "high": 50.0})
    assert words in hint.mixing_hint(positives)
    assert hint.mixing_hint(np.array(positives)) == hint.mixing_hint(positives)
    monkeypatch.setattr(hint, "evidence", lambda: {"low": None, "high": None})
    assert "do not tell" in hint.mixing_hint(positives)


def test_committed_positives_are_those_of_the_data():
    """results.csv against the labels themselves; COCO's where it is there."""
    judged = 0
    for name in ("demo-first", "coco-mini-why"):
        plans = {plan.folder: plan for plan in distinct(read_study(ROOT / "studies" / f"{name}.toml", cache=None))}
        if name != "demo-first" and not SHARED.exists():
            continue
        for line in read_results(ROOT / "studies" / "results" / name / "results.csv")[:3]:
            config = plans[line.run].config
            config.data = config.data.replace("../shared", str(SHARED))
            train, _ = open_train(config)
            assert line.images == len(train)
            assert line.positives == statistics.median(label_counts_of(train, 0).positive.tolist())
            judged += 1
    assert judged >= 3


def test_a_study_uses_the_runs_of_another(tmp_path):
    from test_study import TINY, fake_run

    from gpu_logicmix.study.plan import left_to_do
    from gpu_logicmix.study.results import collect

    (tmp_path / "a.toml").write_text(TINY)
    (tmp_path / "b.toml").write_text('uses = "a"\n' + TINY.replace("Ways to mix", "Again").replace("mixup", "ormixup"))
    first, second = read_study(tmp_path / "a.toml"), read_study(tmp_path / "b.toml")
    for plan in distinct(first):
        fake_run(tmp_path / "a", plan, mAP_cft=0.6)
    collect(first, tmp_path / "a")
    assert {plan.config.mix for plan in left_to_do(second, tmp_path / "b")} == {"ormixup"}
    rows = collect(second, tmp_path / "b")
    assert {r.table for r in rows} == {"Again", "Parts"}
    assert len(rows) == len(second) - 2
    assert {r.run for r in rows} < {r.run for r in read_results(tmp_path / "a" / "results.csv")}
    # Without the study beside it, everything is still to be done.
    assert len(left_to_do(second, tmp_path / "elsewhere" / "b")) == len(distinct(second))


def test_parts_of_the_docs(script):
    docs = script("scripts/study_docs.py")
    studies = docs.all_results()
    assert "No run" in docs.part("table coco-64 / no such table", studies)
    assert re.fullmatch(r"\d+ of 10 runs are finished.\n", docs.part("progress demo-first", studies))
    assert docs.part("points", studies).count("\n") == 2 + len(gain_points(studies.items()))
    with pytest.raises(ValueError, match="must be tables"):
        docs.part("tabel coco-64", studies)
    found = json.loads(docs.hint(gain_points(studies.items())))
    line = gain_line([p for p in gain_points(studies.items()) if not p.study.startswith("demo")])
    assert (found["low"], found["high"]) == pytest.approx(line.limits() or (None, None), abs=0.06)
