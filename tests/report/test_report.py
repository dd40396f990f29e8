"""Pictures and plots: sizes, colours, and text that fits. The page of a run, from whatever is in its folder."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import precision_recall_curve as sklearn_curve

from gpu_logicmix import GPULogicMix, average_precision, label_counts, open_dataset
from gpu_logicmix.decisions import fit_decisions
from gpu_logicmix.report.charts import Series, chart_series, line_chart, thin, ticks
from gpu_logicmix.report.figures import pick_examples, row_images
from gpu_logicmix.report.judged import precision_recall, reliability
from gpu_logicmix.report.label_stats import Share, mixed_labels, stats_figure
from gpu_logicmix.report.pages import chart_style
from gpu_logicmix.report.preview import PRESENT_TEXT, UNKNOWN_TEXT, Step, _font, _label_lines, _wrap, preview_picture
from gpu_logicmix.report.run_folder import read_run
from gpu_logicmix.report.run_page import mixed_batch, write_report
from gpu_logicmix.train.config import Config

NAMES = [f"category {c}" for c in range(12)]


def has_colour(picture, colour):
    rgb = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return (np.asarray(picture) == rgb).all(-1).sum() > 20


def test_preview_shows_images_and_labels():
    images = torch.randint(0, 256, (3, 3, 20, 20), dtype=torch.uint8)
    targets = torch.full((3, 12), -1, dtype=torch.int8)
    targets[:, 0], targets[:, 1] = 1, 0
    steps = [
        Step("original", images, targets, ["1", "2", "3"]),
        Step("after", images.float() / 255, targets, ["", "x", ""]),
    ]
    picture = preview_picture(steps, NAMES, cell=100)
    assert picture.width == 2 * 20 + 3 * 100 + 2 * 14
    assert has_colour(picture, PRESENT_TEXT)
    assert has_colour(picture, UNKNOWN_TEXT)
    plain = preview_picture([Step("original", images, targets[:, :0], ["a"] * 3)], [])
    assert plain.width > 0


def test_label_lines():
    targets = torch.tensor([1, 0, -1, -1, 1, 0, 0, 0, 0, 0, 0, 0])
    lines = _label_lines(targets, NAMES, "1: a.jpg", 400)
    assert lines == [
        ("1: a.jpg", "black"),
        ("category 0, category 4", PRESENT_TEXT),
        ("2 unknown: category 2, category 3", UNKNOWN_TEXT),
        ("8 absent", lines[-1][1]),
    ]


@pytest.mark.parametrize("count", [1, 2, 5, 80])
@pytest.mark.parametrize("most", [1, 3])
def test_text_fits_and_nothing_is_lost(count, most):
    words = [f"name{i}" for i in range(count)]
    lines = _wrap(words, f"{count} unknown: ", _font(14), 190, most)
    assert len(lines) <= most
    assert all(_font(14).getlength(line) <= 190 for line in lines)
    text = " ".join(lines)
    shown = sum(f"name{i}" in text.replace(",", " ").split() for i in range(count))
    hidden = int(text.rsplit("+", 1)[1]) if "+" in text else 0
    assert shown + hidden == count


def test_long_names_are_shortened():
    (line,) = _wrap(["12: a/very/long/path/to/a/photo/of/something_000000123456.jpg"], "", _font(14), 190, 2)
    assert _font(14).getlength(line) <= 190
    assert line.startswith("12: …")
    assert line.endswith("123456.jpg")


def test_mixed_labels_are_what_the_mix_makes_of_them():
    labels = np.random.default_rng(0).integers(-1, 2, (200, 12)).astype(np.int8)
    assert sorted(map(tuple, mixed_labels(labels, GPULogicMix(0.0), 32))) == sorted(map(tuple, labels))
    mixed = mixed_labels(labels, GPULogicMix(1.0, 3, 3), 32, seed=1)
    assert mixed.shape == labels.shape
    assert label_counts(mixed).positive > label_counts(labels).positive
    assert np.array_equal(mixed, mixed_labels(labels, GPULogicMix(1.0, 3, 3), 32, seed=1))


def test_paper_figures_at_30_percent_known(shared):
    """Section 2.3: 0.88 positives and 23.1 negatives a sample; mixed with K 2-3: 2.11 and 4.32.

    The paper also counts the 702 images without any object, which are not in this file.
    """
    from gpu_logicmix import hide_labels

    npz = np.load(shared / "data" / "coco2014_labels.npz")
    labels = hide_labels(npz["labels"][npz["split"] == "train"].astype(np.int8), 0.3)
    mixed = mixed_labels(labels, GPULogicMix(1.0, 2, 3), 32)
    for values, positive, negative in ((labels, 0.88, 23.1), (mixed, 2.11, 4.32)):
        counts = label_counts(values)
        assert abs(counts.positive / (len(values) + 702) - positive) < 0.02
        assert abs(counts.negative / len(values) - negative) < 0.1


@pytest.mark.parametrize("count", [1, 12, 80])
def test_stats_figure(tmp_path, count):
    labels = np.random.default_rng(0).integers(-1, 2, (50, count)).astype(np.int8)
    labels[:, 0] = -1
    shares = [Share("before", labels), Share("after", labels)]
    stats_figure(shares, [f"c{c}" for c in range(count)], "title").savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


# --------------------------------------------------------------------------------------------------- the page of a run
HOSTILE = [
    '<script>alert("1")</script>',
    "a & b",
    "\"quoted' onerror=",
    "</title><img src=http://x.org/a.png>",
    "plain",
    "rare",
]


def write_run(folder, categories=NAMES, epochs=3, end=True, predictions=True, cft=True, seed=0):
    """A run folder as the engine writes it; the numbers are drawn at random."""
    draw = np.random.default_rng(seed)
    count = len(categories)
    folder.mkdir(exist_ok=True)
    options = {
        "data": "shapes",
        "known": 0.1,
        "mix": "logicmix",
        "epochs": 5,
        "cl": True,
        "lr": 2e-4,
        "option": ["count=50"],
    }
    (folder / "config.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    start = {"kind": "start", "time": "2026-11-16T05:00:00+00:00", "images": 1234, "val_images": 30, "known": 0.1003}
    start |= {"categories": categories, "positives": 0.29, "parameters": 3473488, "trained_parameters": 20000}
    start |= {"device": "cpu", "machine": "A machine", "threads": 2, "processes": 1, "versions": {"torch": "2.15.0"}}
    start |= {"command": "gpu-logicmix fit shapes --known 0.1", "messages": ["a message"]}
    lines = [start]
    names = [f"{name}{top}" for top in ("", "_top3") for name in ("CP", "CR", "CF1", "OP", "OR", "OF1")]
    for epoch in range(1, epochs + 1):
        for part in (0.5, 1):
            line = {
                "kind": "step",
                "step": int(20 * (epoch - 1 + part)),
                "epoch": epoch - 1 + part,
                "loss": 0.1 / epoch,
            }
            lines.append(line | {"lr": 1e-4, "images_per_second": 48.2, "waiting": 0.012})
        line = {
            "kind": "epoch",
            "epoch": epoch,
            "step": 20 * epoch,
            "loss": 0.1 / epoch,
            "mAP": draw.random(),
            "val_loss": 0.2,
        }
        line |= {name: draw.random() for name in names}
        lines.append(
            line | {"images_per_second": 47.9, "waiting": 0.01, "seconds": 13.0, "elapsed": 70.0 * epoch, "memory": 2e9}
        )
        line = {"kind": "curriculum", "epoch": epoch, "positives": 1200 + epoch, "negatives": 30000, "unknown": 7}
        lines.append(line | {"precision": 0.9, "recall": 0.4, "precision_positive": 0.777, "recall_positive": None})
    if end:
        best = max((line for line in lines if line["kind"] == "epoch"), key=lambda line: line["mAP"])
        line = {"kind": "end", "elapsed": 221.0, "kept": "best", "epoch": best["epoch"], "mAP": best["mAP"]}
        lines.append(line | {"mAP_last": lines[-2]["mAP"], "mAP_best": best["mAP"]})
    write_lines(folder, lines)
    if predictions:
        targets = draw.integers(-1, 2, (30, count)).astype(np.int8)
        targets[:, -1] = 0  # a category without a positive
        ids = np.array([f"val-{i}" for i in range(30)])
        logits = draw.normal(size=(30, count)).astype(np.float32)
        np.savez(
            folder / "predictions.npz",
            logits=logits,
            targets=targets,
            index=np.arange(30),
            ids=ids,
            categories=categories,
        )
    if cft:
        before = [*draw.random(count - 1).tolist(), None]
        after = [*draw.random(count - 1).tolist(), None]
        summary = {
            "categories": count,
            "changed": 4,
            "skipped": 1,
            "held_out_map_before": 0.5123,
            "held_out_map_after": 0.6234,
        }
        summary |= {"evaluation_map_before": 0.5351, "evaluation_map_after": 0.5456}
        record = {"summary": summary, "ap_before": before, "ap_after": after, "evaluation_before": before}
        record |= {
            "evaluation_after": after,
            "best_epoch": [3] * count,
            "skipped": {str(count - 1): "2 known positive labels"},
        }
        (folder / "cft.json").write_text(json.dumps(record | {"seconds": 12.3, "weights": "cft.safetensors"}))
    return lines


def write_lines(folder, lines):
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Page(HTMLParser):
    """What a browser makes of a page: its elements, its text, and whether everything opened is closed."""

    VOID = ("meta", "img", "line", "circle", "path", "br", "input")

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.source = path.read_text(encoding="utf-8").replace("\u00a0", " ")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1:] not in (["style"], ["script"]) else ""


def some_steps(count=12):
    images = torch.randint(0, 256, (3, 3, 20, 20), dtype=torch.uint8)
    targets = torch.randint(-1, 2, (3, count))
    soft = torch.full((3, count), 0.25)
    soft[:, 1] = float("nan")
    titles = ["original", "flip", "mixup"]
    return [
        Step(titles[0], images, targets, ["1: a", "2: <b>", "3: c"]),
        Step(titles[1], images, targets, [""] * 3),
        Step(titles[2], images.float() / 255, soft, ["1 + 2"] * 3),
    ]


def test_page_of_a_complete_run(tmp_path):
    lines = write_run(tmp_path / "run")
    val, train = (open_dataset("shapes", split, count=30) for split in ("val", "train"))
    train.labels[:, 3] = 0
    train.labels[:7, 3] = 1
    path = write_report(tmp_path / "run", train, val, some_steps())
    assert path == tmp_path / "run" / "report.html"
    assert [f.name for f in path.parent.iterdir() if "report" in f.name] == ["report.html"]  # nothing left aside
    page = Page(path)
    titles = ("What was run", "Curves", "On the validation images", "Average precision of each category")
    titles += ("Category-wise fine-tuning", "Pseudo-labels", "A mixed batch", "Best and worst predictions")
    assert all(title in page.text for title in titles)
    assert "has no end" not in page.text
    # Loss, mAP, speed, waiting; pseudo-labels: two counts and precision, no recall; recall, reliability; 11 small ones.
    assert page.tags.count("svg") == 7 + 2 + 11
    examples = pick_examples(*(np.load(tmp_path / "run" / "predictions.npz")[name] for name in ("logits", "targets")))
    assert page.tags.count("img") == 9 + sum(map(len, examples))
    # The figures are those of the log.
    end = lines[-1]
    kept = next(line for line in lines if line["kind"] == "epoch" and line["epoch"] == end["epoch"])
    for value in (end["mAP"], end["mAP_last"], *(v for name, v in kept.items() if name[:1] in "CO")):
        assert f"{100 * value:.1f} %" in page.text
    for words in (
        "10.0 % of labels known",
        "1,234",
        "3 min 41 s",
        "51.2 % → 62.3 %",
        "53.5 % → 54.6 %",
        "1,203",
        "77.7 %",
    ):
        assert words in page.text, words
    for words in ("A machine", "2.15.0", "--known 0.1", "a message", "0.0002", "count=50", "2 known positive labels"):
        assert words in page.text, words
    assert f"known positive among the validation labels: {NAMES[-1]}." in page.text


def test_page_has_the_ap_of_each_category(tmp_path):
    write_run(tmp_path / "run")
    train = open_dataset("shapes", "train", count=30)
    train.categories = NAMES
    page = Page(write_report(tmp_path / "run", train))
    file = np.load(tmp_path / "run" / "predictions.npz")
    ap = average_precision(torch.from_numpy(file["logits"]), torch.from_numpy(file["targets"])).tolist()
    rows = re.findall(
        r'<td>(category \d+)</td>\s*<td[^>]*><i><b class="" style="margin-left:0%;width:([\d.]+)%"></b></i></td>\s*'
        r'<td data-value="[\d.]+">([\d.]+)</td>\s*<td.*?</svg></td>\s*<td data-value="(\d+)">',
        page.source,
    )
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)
    assert {name: shown for name, _, shown, _ in rows} == {
        n: f"{100 * a:.1f}" for n, a in zip(NAMES[:-1], ap, strict=False)
    }
    assert {name: int(n) for name, *_, n in rows} == dict(
        zip(NAMES[:-1], (train.labels == 1).sum(0).tolist(), strict=False)
    )


def test_options_that_differ_from_the_default_come_first(tmp_path):
    write_run(tmp_path / "run")
    page = Page(write_report(tmp_path / "run", defaults={"epochs": 5, "lr": 0.1, "mix": "logicmix"}))
    first, rest = page.text.split("Options that differ from the default")[1].split("All other options")
    assert "lr0.0002" in first
    assert "datashapes" in first
    assert "epochs5" in rest
    assert "mixlogicmix" in rest


def test_page_of_a_run_that_has_only_begun(tmp_path):
    write_run(tmp_path / "run", epochs=0, end=False, predictions=False, cft=False)
    page = Page(write_report(tmp_path / "run"))
    assert "no end yet" in page.text
    assert "0 of 5 epochs" in page.text
    assert "Nothing is logged yet" in page.text
    assert "svg" not in page.tags
    (tmp_path / "run" / "log.jsonl").unlink()
    assert "no end yet" in Page(write_report(tmp_path / "run")).text
    (tmp_path / "run" / "config.toml").unlink()
    with pytest.raises(FileNotFoundError, match="no run here"):
        write_report(tmp_path / "run")


def test_page_of_a_killed_run_shows_the_best_so_far(tmp_path):
    lines = write_run(tmp_path / "run", end=False, predictions=False, cft=False)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # killed while it wrote
    page = Page(write_report(tmp_path / "run"))
    best = max((line for line in lines if line["kind"] == "epoch"), key=lambda line: line["mAP"])
    assert f"Validation mAP, best so far{100 * best['mAP']:.1f} %" in page.text
    assert f"epoch {best['epoch']}" in page.text
    assert "after 3 of 5 epochs" in page.text
    assert "1 damaged line left out" in page.text


def test_a_resumed_run_counts_its_epochs_once(tmp_path):
    lines = write_run(tmp_path / "run")
    again = [line for line in lines if line["kind"] in ("step", "epoch") and line["epoch"] > 1]
    write_lines(tmp_path / "run", [*lines[:-1], lines[0], *again, lines[-1]])
    run = read_run(tmp_path / "run")
    assert [line["step"] for line in run.steps] == [10, 20, 30, 40, 50, 60]
    assert [line["epoch"] for line in run.epochs] == [1, 2, 3]
    assert "resumed 1 ×" in Page(write_report(tmp_path / "run")).text
    # Resumed once more and not at its end yet.
    write_lines(tmp_path / "run", [*lines, lines[0]])
    page = Page(write_report(tmp_path / "run"))
    assert "no end yet" in page.text
    assert "may be of before the run was resumed" in page.text


@pytest.mark.parametrize("nothing", [None, float("nan"), float("inf"), "missing"])
def test_page_without_numbers(tmp_path, nothing):
    def empty(value):
        if isinstance(value, dict):
            return {
                k: empty(v)
                for k, v in value.items()
                if k in keep or nothing != "missing" or isinstance(v, (dict, list))
            }
        if isinstance(value, list):
            return [empty(v) for v in value]
        return nothing if isinstance(value, float) else value

    keep = ("kind", "epoch", "step", "summary")
    lines = write_run(tmp_path / "run")
    write_lines(tmp_path / "run", [{**empty(line), **{k: line[k] for k in keep if k in line}} for line in lines])
    cft = tmp_path / "run" / "cft.json"
    cft.write_text(json.dumps(empty(json.loads(cft.read_text()))))
    file = dict(np.load(tmp_path / "run" / "predictions.npz"))
    file["logits"][:] = np.nan
    file["logits"][0] = np.inf
    np.savez(tmp_path / "run" / "predictions.npz", **file)
    page = Page(write_report(tmp_path / "run", steps=some_steps()))
    assert "Validation mAP–" in page.text
    assert "are not finite" in page.text
    assert not re.search(r"\b(nan|inf|None|null)\b", page.text)
    assert not any(re.search(r"nan|inf\b|None", value or "") for name, value in page.attributes if name != "src")


def test_page_says_which_weights_are_kept(tmp_path):
    lines = write_run(tmp_path / "run")
    assert "Kept:" not in Page(write_report(tmp_path / "run")).text
    for kept, words in (("cft", "the fine-tuned weights"), ("model", "the weights before fine-tuning")):
        line = {"kind": "cft", "kept": kept, "gain": 0.0123, "gain_interval": [-0.002, 0.0266], "mAP": 0.5}
        write_lines(tmp_path / "run", [*lines[:-1], line, lines[-1]])
        text = Page(write_report(tmp_path / "run")).text
        assert f"Kept: {words}" in text
        assert "is +1.2 points (95 % interval -0.2 to +2.7)" in text
    write_lines(tmp_path / "run", [*lines[:-1], {**line, "gain": None, "gain_interval": [None, None]}, lines[-1]])
    assert "Kept: the weights before" in Page(write_report(tmp_path / "run")).text


def test_page_shows_the_last_fine_tuning(tmp_path):
    """The command `cft` writes cft.json anew and nothing into the log."""
    lines = write_run(tmp_path / "run")
    line = {"kind": "cft", "kept": "model", "gain": 0.0123, "gain_interval": [-0.002, 0.0266], "mAP": 0.5}
    write_lines(tmp_path / "run", [*lines[:-1], line, lines[-1]])
    cft = tmp_path / "run" / "cft.json"
    again = {"kept": "cft", "gain": 0.0456, "gain_interval": [0.011, 0.08]}
    cft.write_text(json.dumps(json.loads(cft.read_text()) | again))
    text = Page(write_report(tmp_path / "run")).text
    assert "Kept: the fine-tuned weights" in text
    assert "is +4.6 points (95 % interval +1.1 to +8.0)" in text


def test_page_says_that_thresholds_are_of_earlier_weights(tmp_path):
    write_run(tmp_path / "run")
    save_file({"a": torch.zeros(1)}, tmp_path / "run" / "cft.safetensors", metadata={"digest": "1"})
    logits, targets = torch.randn(40, 2), torch.arange(80).view(40, 2) % 2
    for digest, outdated in (("1", False), ("2", True)):
        found = fit_decisions(logits, targets, ["a", "b"], weights="cft", digest=digest)
        found.write(tmp_path / "run" / "decisions.json")
        text = Page(write_report(tmp_path / "run")).text
        assert "for the fine-tuned weights: a temperature" in text
        assert ("written anew since" in text) == ("gpu-logicmix decide RUN --use cft" in text) == outdated


def test_page_lists_skipped_images(tmp_path):
    lines = write_run(tmp_path / "run")
    assert "could not be read" not in Page(write_report(tmp_path / "run")).text
    bad = {"kind": "bad_images", "count": 1234, "lines": ["a/<b>.jpg: truncated", "c.jpg: empty"]}
    write_lines(tmp_path / "run", [*lines[:-1], bad, lines[-1]])
    page = Page(write_report(tmp_path / "run"))
    assert "1,234 images could not be read and were skipped" in page.text
    assert "a/<b>.jpg: truncated\nc.jpg: empty" in page.text
    write_lines(tmp_path / "run", [*lines[:-1], {"kind": "bad_images", "count": "x", "lines": 5}, lines[-1]])
    assert "could not be read" not in Page(write_report(tmp_path / "run")).text


@pytest.mark.parametrize("trained_on", [False, True])
def test_page_shows_decisions(tmp_path, trained_on):
    write_run(tmp_path / "run")
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(60, 12, generator=draw), torch.randint(-1, 2, (60, 12), generator=draw)
    targets[:, 3] = 0
    found = fit_decisions(logits, targets, HOSTILE[:1] + NAMES[1:], fitted_on="60 <b>images", trained_on=trained_on)
    found.write(tmp_path / "run" / "decisions.json")
    page = Page(write_report(tmp_path / "run"))
    section = page.text.split("Decisions")[1]
    assert "Fitted on 60 <b>images, for the weights as trained" in section
    assert f"a temperature of {found.temperature:.2f} and a shift of {found.shift:.2f}" in section
    assert ("trained on these images" in section) == trained_on
    assert "Too few labels to decide: 1 of the categories" in section
    assert all(f"{category['threshold']:.2f}" in section for category in found.categories)
    assert "before calibration" in section
    assert "calibrated, error" in page.text.split("Decisions")[0]  # on the validation images
    assert page.tags.count("script") == 1
    (tmp_path / "run" / "decisions.json").write_text("[]")
    assert "decisions.json cannot be read" in Page(write_report(tmp_path / "run")).text


@pytest.mark.parametrize("seed", range(5))
def test_precision_recall_and_reliability_against_slow_oracles(seed):
    draw = np.random.default_rng(seed)
    scores, targets = draw.integers(-4, 5, 60).astype(np.float32), draw.integers(-1, 2, 60)
    known = targets >= 0
    points = precision_recall(scores, targets)
    expected = []
    for cut in sorted(set(scores[known]), reverse=True):
        taken = known & (scores >= cut)
        hits = (targets[taken] == 1).sum()
        expected.append((hits / (targets == 1).sum(), hits / taken.sum()))
    assert np.array(points) == pytest.approx(np.array(expected))
    precision, recall, _ = sklearn_curve(targets[known], scores[known])
    pairs = sorted(zip(recall[:-1], precision[:-1], strict=True))
    assert np.array(sorted(points)) == pytest.approx(np.array(pairs))
    found = reliability(scores, targets)
    shares = 1 / (1 + np.exp(-scores[known].astype(float)))
    total = 0.0
    for low in range(10):
        inside = (shares >= low / 10) & (shares < (low + 1) / 10)
        total += abs((shares[inside] - (targets[known][inside] == 1)).sum()) if inside.any() else 0
    assert found.error == pytest.approx(total / known.sum(), abs=1e-6)
    assert sum(found.count) == known.sum()
    assert precision_recall(scores, np.zeros(60)) == []


def test_a_long_curve_is_thinned_before_it_is_a_list():
    draw = np.random.default_rng(0)
    scores, targets = draw.normal(size=1003), draw.integers(-1, 2, 1003)
    whole = precision_recall(scores, targets)
    for most in (1, 7, 200, 5000):
        assert np.allclose(precision_recall(scores, targets, most), thin(whole, most))


def test_the_batch_of_a_report_is_mixed():
    """Also where p is so small that in training hardly any sample would be."""
    train = open_dataset("shapes", "train", 32, count=16)
    for mix, words in (("logicmix", "images "), ("mixup", "images "), ("none", None)):
        steps = mixed_batch(train, Config(data="shapes", size=32, mix=mix, p=0.01, randaugment=False))
        if words is None:
            assert [step.title for step in steps] == ["original", "flip"]
        else:
            assert all(caption.startswith(words) for caption in steps[-1].captions)


def test_names_of_operations_are_not_cut():
    for ops in (["AutoContrast", "TranslateX"], ["TranslateX", "TranslateY", "AutoContrast", "Brightness"]):
        lines = _label_lines(torch.tensor([0] * 12), NAMES, ", ".join(ops), 192)
        text = " ".join(line for line, colour in lines if colour == "black")
        assert text == ", ".join(ops)
        assert all(_font(14).getlength(line) <= 192 for line, _ in lines)


def test_no_empty_plots_of_pseudo_labels(tmp_path):
    lines = write_run(tmp_path / "run")
    nothing = {"positives": 0, "negatives": 0, "precision_positive": None, "recall_positive": 0.0}
    write_lines(tmp_path / "run", [line | (nothing if line["kind"] == "curriculum" else {}) for line in lines])
    page = Page(write_report(tmp_path / "run"))
    section = page.source.split("Pseudo-labels (curriculum labeling)")[1].split("<section>")[0]
    assert "<svg" not in section
    assert "No label passed the thresholds" in section


def test_stats_with_names_that_are_no_tex(tmp_path):
    labels = np.random.default_rng(0).integers(-1, 2, (50, 3)).astype(np.int8)
    shares = [Share("before", labels), Share("after", labels)]
    figure = stats_figure(shares, [r"$\frac$", "a $ b", "$x$"], r"$\undefined{$")
    figure.savefig(tmp_path / "a.png")
    figure.draw_without_rendering()
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    # Legends stand outside the axes, where there is no data.
    for axes in figure.axes:
        legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert legend.y0 >= inside.y1 - 2


def test_colours_of_pages_are_those_of_pictures():
    style = chart_style()
    assert all(colour in style for colour in (PRESENT_TEXT, UNKNOWN_TEXT))


def test_damaged_files_are_named(tmp_path):
    write_run(tmp_path / "run")
    for name in ("config.toml", "cft.json", "predictions.npz"):
        (tmp_path / "run" / name).write_text("{ damaged <b>")
    page = Page(write_report(tmp_path / "run"))
    assert all(f"{name} cannot be read" in page.text for name in ("config.toml", "cft.json", "predictions.npz"))


def test_hostile_names_stay_text(tmp_path):
    lines = write_run(tmp_path / "run", HOSTILE)
    name = HOSTILE[0]
    lines[0] |= {"machine": name, "command": name, "messages": [name], "versions": {name: name}, "time": name}
    write_lines(tmp_path / "run", lines)
    (tmp_path / "run" / "config.toml").write_text(
        f"data = '''coco:{name}'''\n{json.dumps(name)} = '''{name}'''\nmix = '''{name}'''\n"
    )
    file = dict(np.load(tmp_path / "run" / "predictions.npz"))
    np.savez(tmp_path / "run" / "predictions.npz", **file | {"ids": np.array([name] * 30)})
    cft = json.loads((tmp_path / "run" / "cft.json").read_text())
    cft["skipped"] = {name: name, "0": name}
    (tmp_path / "run" / "cft.json").write_text(json.dumps(cft))
    val = open_dataset("shapes", "val", count=30)
    val.ids = [name] * 30
    steps = [Step(name, s.images, s.targets, [name] * 3) for s in some_steps(len(HOSTILE))]
    page = Page(write_report(tmp_path / "run", val=val, steps=steps, defaults={"lr": 1}))
    assert page.tags.count("script") == 1  # our own, and the browser runs no other
    (policy,) = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    (own,) = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert all(name in page.text for name in HOSTILE)
    images = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert len(images) > 9
    assert all(value.startswith("data:image/jpeg;base64,") for value in images)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not re.search(r"url\(|@import|<link", page.source)


def test_pictures_are_those_of_the_predictions(tmp_path):
    write_run(tmp_path / "run", cft=False)
    val = open_dataset("shapes", "val", count=40)
    file = dict(np.load(tmp_path / "run" / "predictions.npz"))
    order = np.random.default_rng(0).permutation(40)[:30]
    np.savez(tmp_path / "run" / "predictions.npz", **file | {"index": order, "ids": np.array(val.ids)[order]})
    found = read_run(tmp_path / "run").predictions
    pictures, problem = row_images(found, val, [3, 7, 20])
    assert problem == ""
    assert all(torch.equal(pictures[row], val[int(order[row])][0]) for row in (3, 7, 20))
    val.ids = [f"other-{i}" for i in range(40)]
    assert "not those of the predictions" in Page(write_report(tmp_path / "run", val=val)).text
    assert "not at hand" in Page(write_report(tmp_path / "run")).text
    assert "cannot be read" in row_images(found._replace(index=found.index + 100), val, [3])[1]


@pytest.mark.parametrize("seed", range(20))
def test_examples_against_a_slow_oracle(seed):
    draw = np.random.default_rng(seed)
    rows, columns, count = draw.integers(1, 12), draw.integers(1, 9), 4
    logits = draw.integers(-4, 5, (rows, columns)).astype(np.float32)  # with ties
    logits[draw.random(logits.shape) < 0.1] = np.nan
    logits[draw.random(logits.shape) < 0.1] = np.inf
    logits[draw.random(logits.shape) < 0.1] = -np.inf
    targets = draw.integers(-1, 2, logits.shape).astype(np.int8)
    found = pick_examples(logits, targets, count)
    for pairs, label, sign in ((found.right, 1, 1), (found.false, 0, 1), (found.missed, 1, -1)):
        expected = []
        able = [
            (r, c)
            for r in range(rows)
            for c in range(columns)
            if targets[r, c] == label and logits[r, c] == logits[r, c]
        ]
        for r, c in sorted(able, key=lambda pair: -sign * logits[pair]):
            if len(expected) < count and all(r != a and c != b for a, b in expected):
                expected.append((r, c))
        assert pairs == expected


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.0312, 0.0313), (17.2, 19.5), (0, 0), (5, 5), (1e-9, 3e-9), (0, 5.9e6)]
)
def test_axis_ticks_enclose_the_values(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-12
    assert marks[-1] >= high - 1e-12
    assert len(marks) <= 7
    assert marks == sorted(set(marks))


def test_long_curves_keep_their_mean():
    points = [(float(i), float(i % 7)) for i in range(1000)]
    fewer = thin(points)
    assert len(fewer) == 200
    assert np.mean([y for _, y in fewer]) == pytest.approx(np.mean([y for _, y in points]))
    assert thin([(0.0, None)] * 1000)[0][1] is None
    assert line_chart("t", Series("a", "one", [(0.5, None)])) == ""
    chart = line_chart("t", Series("a", "one", [(1, 1e-4), (2, None), (3, 10.0)]))
    assert chart.count("<circle") == 2
    assert "logarithmic" in chart


def test_many_categories_are_all_in_one_table(tmp_path):
    write_run(tmp_path / "run", [f"category {c}" for c in range(300)], cft=False)
    page = Page(write_report(tmp_path / "run"))
    (table,) = re.findall(r'<table class="sortable">.*?</table>', page.source, re.DOTALL)
    assert table.count("<tr>") == 1 + 299  # one has no AP
    assert "search 299 categories" in page.source


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    path = write_report(tmp_path / "run")
    before = path.read_text()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("gpu_logicmix.files.os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path / "run", steps=some_steps())
    assert path.read_text() == before
    assert not [*path.parent.glob("*.part"), *path.parent.glob(".*.tmp")]


def test_epochs_without_validation_leave_no_gap_in_the_curve():
    lines = [{"epoch": 1}, {"epoch": 2, "mAP": 0.5}, {"epoch": 3}, {"epoch": 4, "mAP": None}, {"epoch": 5, "mAP": 0.25}]
    assert chart_series("mAP", "one", lines, "mAP", factor=100).points == [(2, 50), (4, None), (5, 25)]
