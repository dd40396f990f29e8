"""predict, decide and export on a run of a minute ago: files, thresholds, the contact sheet."""

import csv
import json
import re
import runpy
import shutil
import sys

import pytest
import torch
from commands import run as command
from PIL import Image
from places import ROOT

from gpu_logicmix.data import open_dataset
from gpu_logicmix.data.shapes import CATEGORIES
from gpu_logicmix.decisions import read_decisions
from gpu_logicmix.metrics import precision_recall
from gpu_logicmix.train.decide import decide
from gpu_logicmix.train.inputs import open_train, open_tune
from gpu_logicmix.train.predict import Predictions, evaluate_run, load_run

OPTIONS = (
    "-o count=300 --known 0.6 --size 32 --model test_resnet --weights none --head linear --epochs 2 --batch-size 20 "
    "--accumulate 1 --lr 2e-3 --workers 0 --threads 1 --no-cft --no-cl --no-randaugment --tune-images 100"
)


def good(*arguments) -> str:
    code, output = command(*arguments)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    good("fit", "shapes", *OPTIONS.split(), "--out", folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    dataset = open_dataset("shapes", "test", 48, count=45)
    for i in range(45):
        Image.fromarray(dataset[i][0].permute(1, 2, 0).numpy()).save(folder / f"{i:02}<b>.png")
    return folder


def test_fit_writes_decisions_from_held_out_images(trained):
    """Fitted on the images of tune_images, which the run neither trained on nor is judged by."""
    found = read_decisions(trained, "model")
    assert found.names == list(CATEGORIES)
    assert found.images == 100
    assert not found.trained_on
    config, model, _, _ = load_run(trained)
    tune = open_tune(config)
    images, targets, _ = tune[range(100)]
    with torch.inference_mode():
        logits = model(images.float().div(255))
    for c, entry in enumerate(found.categories):
        known = targets[:, c] != -1
        assert entry["positives"] == int((targets[:, c] == 1).sum())
        if entry["decided"]:
            y, guess = targets[known, c] == 1, logits[known, c] > entry["logit"]
            assert entry["f1"] == pytest.approx(2 * int((y & guess).sum()) / (int(guess.sum()) + int(y.sum())))
            assert entry["f1"] >= entry["f1_at_half"]
    assert sum(entry["decided"] for entry in found.categories) >= 6


def test_without_tune_images_the_training_labels_are_split(tmp_path):
    options = OPTIONS.replace("--tune-images 100", "--tune-images 0")
    output = good("fit", "shapes", *options.split(), "--out", tmp_path / "run")
    assert "20% of the known labels of 300 training images" in output
    found = read_decisions(tmp_path / "run")
    assert found.trained_on
    good("fit", "shapes", *options.split(), "--no-decisions", "--out", tmp_path / "without")
    assert not (tmp_path / "without" / "decisions.json").exists()


def test_evaluate_on_another_split_of_the_same_data(trained):
    assert "on 300 images" in good("evaluate", trained)
    config, _, _, _ = load_run(trained)
    count = len(open_dataset("shapes", "test", 32, count=300))
    assert f"on {count} images" in good("evaluate", trained, "--split", "test")
    assert evaluate_run(trained, split="train").metrics.mAP != evaluate_run(trained).metrics.mAP
    code, output = command("evaluate", trained, "--split", "nonsense")
    assert code == 1
    assert "split='nonsense'" in output or "--split" in output
    assert config.holdout == 0


def test_evaluate_at_the_thresholds(trained, tmp_path):
    output = good("evaluate", trained, "--out", tmp_path / "e.json", "--threads", 1)
    assert "at the run's thresholds" in output
    values = json.loads((tmp_path / "e.json").read_text())
    found, (_, model, _, _) = read_decisions(trained), load_run(trained)
    images, targets, _ = open_dataset("shapes", "val", 32, count=300)[range(300)]
    with torch.inference_mode():
        logits = model(images.float().div(255))
    cut = torch.tensor([c["logit"] for c in found.categories])
    expected = precision_recall((logits > cut).float(), targets, logits=False)
    assert list(values["at_thresholds"].values()) == pytest.approx(list(expected), abs=1e-6)
    assert values["at_thresholds"]["CF1"] != values["CF1"]
    assert values["at_thresholds"]["CF1"] == evaluate_run(trained, threads=1).decided.CF1


def test_all_formats_say_the_same(trained, pictures, tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    for suffix in ("csv", "jsonl", "parquet", "json"):
        good("predict", trained, pictures, "--out", tmp_path / f"p.{suffix}", "--threads", 1)
    found = read_decisions(trained)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["image"] for line in lines] == sorted(map(str, pictures.iterdir()))
    for line in lines:
        assert [entry["category"] for entry in line["categories"]] == list(CATEGORIES)
        for entry, threshold in zip(line["categories"], found.thresholds.tolist(), strict=True):
            assert entry["threshold"] == pytest.approx(threshold, abs=1e-6)
            if abs(entry["probability"] - threshold) > 1e-5:
                assert entry["predicted"] == (entry["probability"] > threshold)
        assert line["predicted"] == [entry["category"] for entry in line["categories"] if entry["predicted"]]
    with open(tmp_path / "p.csv", newline="") as file:
        heading, *rows = csv.reader(file)
    assert heading == ["image", *CATEGORIES, "predicted"]
    for row, line in zip(rows, lines, strict=True):
        assert [float(v) for v in row[1:-1]] == [entry["probability"] for entry in line["categories"]]
        assert json.loads(row[-1]) == line["predicted"]
    table = pyarrow.read_table(tmp_path / "p.parquet").to_pylist()
    flat = [(line["image"], *entry.values()) for line in lines for entry in line["categories"]]
    for row, entry in zip(table, flat, strict=True):
        image, category, probability, threshold, predicted = row.values()
        assert (image, category, predicted) == (entry[0], entry[1], entry[4])
        assert (probability, threshold) == pytest.approx(entry[2:4], rel=1e-6)
    assert pyarrow.ParquetFile(tmp_path / "p.parquet").num_row_groups == 3  # one a batch: it streams
    by_name = json.loads((tmp_path / "p.json").read_text())
    assert list(by_name) == [line["image"] for line in lines]


def test_topk(trained, pictures, tmp_path):
    good("predict", trained, pictures, "--topk", 2, "--out", tmp_path / "p.csv", "--threads", 1)
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 90
    parts = list(Predictions(trained, [pictures], threads=1))
    best = torch.cat([part.probabilities for part in parts]).topk(2)
    assert [row["category"] for row in rows] == [CATEGORIES[c] for c in best.indices.flatten().tolist()]
    assert [float(row["probability"]) for row in rows] == pytest.approx(best.values.flatten().tolist(), abs=1e-6)


def test_predictions_come_in_batches(trained, pictures):
    """One batch at a time is read, so that memory does not grow with the number of images."""
    predictions = Predictions(trained, [pictures], threads=1)
    read, source = [], predictions.dataset.source
    inner = source.read
    source.read = lambda index: read.append(index) or inner(index)
    batches = iter(predictions)
    assert len(next(batches).names) == 20
    assert len(read) <= 40
    assert [len(part.names) for part in batches] == [20, 5]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_a_prediction_that_fails_leaves_the_earlier_file(trained, pictures, tmp_path, suffix, monkeypatch):
    out, sheet = tmp_path / f"x.{suffix}", tmp_path / "x.html"
    good("predict", trained, pictures, "--out", out, "--sheet", sheet, "--threads", 1)
    before = out.read_bytes(), sheet.read_bytes()

    def stopped(self):
        yield from list(rows(self))[:1]
        raise KeyboardInterrupt

    rows = Predictions.__iter__
    monkeypatch.setattr(Predictions, "__iter__", stopped)
    code, _ = command("predict", trained, pictures, "--out", out, "--sheet", sheet, "--batch-size", 8, "--threads", 1)
    assert code == 130
    assert (out.read_bytes(), sheet.read_bytes()) == before
    assert {path.name for path in tmp_path.iterdir()} == {out.name, sheet.name}
    code, output = command("predict", trained, pictures, "--out", out, "--sheet", tmp_path / "no" / "x.html")
    assert code == 1
    assert "x.html: there is no folder" in output
    assert out.read_bytes() == before[0]


def test_contact_sheet(trained, pictures, tmp_path):
    good("predict", trained, pictures, "--sheet", tmp_path / "s.html", "--sheet-images", 30, "--threads", 1)
    page = (tmp_path / "s.html").read_text()
    assert page.count("<figure>") == page.count("data:image/jpeg;base64,") == 30
    assert "<b>" not in page  # of the file names
    assert "00&lt;b&gt;.png" in page
    assert re.search(r"default-src 'none'", page)


def test_decide_with_a_precision(trained, tmp_path):
    before = (trained / "decisions.json").read_text()
    try:
        output = good("decide", trained, "--precision", 0.5, "--min-labels", 3, "--threads", 1)
        assert "recall at precision 0.5" in output
        found = read_decisions(trained)
        assert (found.floor, found.min_labels) == (0.5, 3)
        assert all(c["precision"] >= 0.5 for c in found.categories if c["decided"])
    finally:
        (trained / "decisions.json").write_text(before)
    code, output = command("decide", trained, "--precision", 1.5)
    assert code
    assert "--precision 1.5: must be above 0 and at most 1" in output
    assert decide(trained, threads=1) == read_decisions(trained)  # fitted again: the same


def test_prior_is_the_mean_probability_of_training_images(trained, tmp_path):
    output = good("prior", trained, "--out", tmp_path / "prior.csv", "--threshold", 0.4, "--threads", 1)
    assert f"--loss-option prior={tmp_path / 'prior.csv'} --loss-option threshold=0.4" in " ".join(output.split())
    config, model, categories, _ = load_run(trained, "model")
    dataset, _ = open_train(config)
    assert len(dataset) == 200  # without the images to tune by
    with torch.inference_mode():
        expected = model(dataset[range(200)][0].float().div(255)).sigmoid().mean(0)
    with open(tmp_path / "prior.csv", newline="") as file:
        found = {row["Classes"]: float(row["avg_pred"]) for row in csv.DictReader(file)}
    assert found == pytest.approx(dict(zip(categories, expected.tolist(), strict=True)), abs=1e-5)
    assert f"{sum(p > 0.4 for p in found.values())} of them are above 0.4" in output
    loss = ["--loss", "csl", "--loss-option", f"prior={tmp_path / 'prior.csv'}", "--epochs", 1]
    good("fit", "shapes", *OPTIONS.split(), *loss, "--out", tmp_path / "second")
    code, output = command("prior", trained, "--out", tmp_path / "none" / "prior.csv")
    assert code == 1
    assert "there is no folder" in output


def test_export_of_a_run(trained, tmp_path):
    timm = pytest.importorskip("timm")
    output = good("export", trained, "--to", "timm", "--out", tmp_path / "t.safetensors")
    assert re.search(r"logits differ by at most \d", output)
    loaded = timm.create_model("test_resnet", checkpoint_path=str(tmp_path / "t.safetensors"), num_classes=12)
    assert loaded.num_classes == 12
    about = json.loads((tmp_path / "t.json").read_text())
    assert about["thresholds"] == pytest.approx(read_decisions(trained).thresholds.tolist())
    good("export", trained, "--to", "hf", "--license", "cc-by-4.0")
    text = (trained / "export" / "hf" / "README.md").read_text()
    assert "| known labels | `0.6 (uniform)` |" in text
    assert "mAP on validation" in text
    assert 'license: "cc-by-4.0"' in text


@pytest.mark.slow
def test_the_onnx_script_says_what_predict_says(trained, pictures, tmp_path, monkeypatch, capsys):
    """The script of the docs: onnxruntime, Pillow and numpy alone, on the file that export wrote."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    good("export", trained, "--to", "onnx", "--out", tmp_path / "m.onnx")
    good("predict", trained, pictures, "--out", tmp_path / "p.jsonl", "--threads", 1)
    script = ROOT / "examples" / "onnx_predict.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 22  # with its own description
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "m.onnx"), *sorted(map(str, pictures.iterdir()))])
    capsys.readouterr()
    runpy.run_path(str(script))
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    wanted = [(line["image"], *entry.values()) for line in lines for entry in line["categories"]]
    assert len(printed) == len(wanted) == 45 * len(CATEGORIES)
    for (name, category, probability, said), (image, label, exact, threshold, predicted) in zip(
        printed, wanted, strict=True
    ):
        assert (name, category) == (image, label)
        assert float(probability) == pytest.approx(exact, abs=2e-3)  # Pillow rounds another way when it resizes
        if abs(exact - threshold) > 2e-3:
            assert (said == "yes") == predicted


def test_wrong_files(trained, pictures, tmp_path):
    code, output = command("predict", trained, pictures, "--out", tmp_path / "p.xlsx")
    assert code
    assert "must end in .csv, .jsonl, .parquet, .json" in output


def test_thresholds_of_other_weights_are_a_line(trained, pictures, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    file = run / "decisions.json"
    text = re.sub(r'"digest": "\w+"', '"digest": "0123456789abcdef"', file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    for arguments in (("predict", run, pictures, "--threads", 1), ("export", run, "--to", "timm")):
        output = good(*arguments)
        assert output.count("gpu-logicmix decide") >= 1
        assert "OtherWeights" not in output
        assert "decisions.py" not in output
