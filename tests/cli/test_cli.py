"""The command line, as a user types it: what works, and one line for what does not."""

import csv
import json
import platform
import shutil
import signal
import subprocess
import sys
import time

import launch
import pytest
import torch
from commands import run
from PIL import Image
from safetensors.torch import load_file
from trees import csv_tree

from gpu_logicmix import category_wise_fine_tune, cli, hide_labels, metrics
from gpu_logicmix.data import open_dataset
from gpu_logicmix.data.images import read_image
from gpu_logicmix.data.shapes import CATEGORIES
from gpu_logicmix.decisions import read_decisions
from gpu_logicmix.models.classifier import build_model
from gpu_logicmix.train import loop, tuneblocks
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import read_toml
from gpu_logicmix.train.predict import kept_weights
from gpu_logicmix.train.runlog import read_log


def test_stats(tmp_path, capsys):
    plot = tmp_path / "stats.png"
    code, _ = run("stats", "shapes", "-o", "count=300", "--known", "0.3", "--plot", plot, "--protocol", "hcp")
    assert code == 0
    assert plot.stat().st_size > 5000
    for extra in (["--protocol", "single-positive"], ["--protocol", "per-class", "--known", "5"], ["--all"]):
        assert run("stats", "shapes", "-o", "count=50", *extra)[0] == 0


def test_preview(tmp_path):
    out = tmp_path / "preview.png"
    code, text = run("preview", "shapes", "--known", "0.5", "--count", "3", "--size", "32", "--out", out)
    assert code == 0, text
    with Image.open(out) as picture:
        assert picture.width > 3 * 192
    csv = csv_tree(tmp_path / "d", "image,cat\nimg/a.png,1\nimg/b.png,0\nimg/c.png,?\n")
    (tmp_path / "d" / "img" / "b.png").write_bytes(b"broken")
    code, text = run("preview", f"csv:{csv}", "--out", out)
    assert code == 1
    assert "b.png: cannot be decoded" in text
    assert run("preview", f"csv:{csv}", "--out", out, "--on-bad-image", "skip")[0] == 0


def test_stats_of_sparse_labels_and_pack(tmp_path):
    code, text = run(
        "stats", "shapes", "-o", "count=50", "-o", "labels=sparse", "--known", "0.3", "--plot", tmp_path / "a.png"
    )
    assert code == 0, text
    assert "sparse" in text
    dense = run("stats", "shapes", "-o", "count=50", "--known", "0.3")[1]
    for words in ("circle", "checks", "LogicMix p=0.5", "before  ", "all labels"):
        (ours,), (theirs,) = ([line.split() for line in t.splitlines() if words in line] for t in (text, dense))
        assert ours == theirs  # also after mixing
    assert (tmp_path / "a.png").stat().st_size > 5000
    code, text = run(
        "pack", "shapes", "-o", "count=5", "--out", tmp_path / "shards", "--size", "16", "--per-shard", "2"
    )
    assert code == 0, text
    assert len(list((tmp_path / "shards").glob("train-*.tar"))) == 3
    assert run("stats", f"tar:{tmp_path / 'shards'}")[0] == 0


def test_cache(tmp_path):
    for _ in range(2):
        code, text = run("cache", "shapes", "--to", tmp_path, "--size", "16", "-o", "count=40", "--verify")
        assert code == 0, text
    (folder,) = tmp_path.glob("shapes-train-16-*")
    assert (folder / "images.u8").stat().st_size == 40 * 16 * 16 * 3
    assert run("cache", "shapes", "--to", tmp_path, "--size", "16", "-o", "count=41")[0] == 0  # beside the other
    assert run("cache", "shapes", "--to", tmp_path, "--size", "16", "-o", "count=41", "--rebuild")[0] == 0
    code, text = run("cache", "--to", tmp_path, "--list")
    assert code == 0, text
    assert "40 images of 16 px from shapes" in text
    assert "2 caches" in text
    code, text = run("cache", "--to", tmp_path, "--prune", "--days", "0")
    assert code == 0, text
    assert f"removed {folder}" in text
    assert "0 caches" in text
    code, text = run("cache", "--to", tmp_path)
    assert code == 1
    assert "which dataset?" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stats", "coco:/nowhere"), "/nowhere: no such file or folder"),
        (("stats", "shape"), "'shape': unknown dataset"),
        (("stats", "shapes", "--known", "1.5"), "--known 1.5: must be above 0 and at most 1"),
        (("stats", "shapes", "-o", "count"), "--option 'count': write NAME=VALUE"),
        (("stats", "shapes", "-o", "size=3"), "write --size 3"),
        (("stats", "shapes", "-o", "colour=3"), "option 'colour': shapes has the options count, seed"),
        (("stats", "shapes", "--k-min", "4"), "--k-max 3"),
        (("preview", "shapes", "--p", "2"), "--p 2"),
        (("stats", "shapes", "--known", "inf", "--protocol", "per-class"), "--known inf"),
        (("stats", "shapes", "--known", "nan", "--protocol", "per-class"), "--known nan"),
        (("stats", "csv:~nobody-of-that-name/x.csv"), "~nobody-of-that-name/x.csv: there is no such user"),
        (("check", "--device", "foo"), "--device foo: "),
        (("cache", "shapes", "--to", "cache", "--days", "5"), "--days 5: goes with --prune"),
    ],
)
def test_mistakes(arguments, words):
    code, text = run(*arguments)
    assert code == 1
    assert words in text


def test_train_py_ends_in_one_line_and_teaches():
    from places import ROOT

    def train(*arguments):
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    wrong = train("stats", "coco:/nowhere")
    assert wrong.returncode == 1
    assert wrong.stderr.strip() == "error: /nowhere: no such file or folder"
    assert wrong.stdout == ""
    assert run("frobnicate")[0] == 2
    text = run("cache", "--help")[1]
    assert "gpu-logicmix cache coco:/data/coco" in " ".join(text.split())


# ----------------------------------------------------------------------------------------------- training, and after it
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run without fine-tuning."""
    folder = tmp_path_factory.mktemp("trained")
    launch.good(folder, *launch.SMALL, "--no-cft", "--out", folder / "run")
    return folder / "run"


def pictures(folder, count=5):
    """Some files to predict."""
    folder.mkdir()
    dataset = open_dataset("shapes", "test", 48, count=count)
    for i in range(count):
        Image.fromarray(dataset[i][0].permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    return folder


def by_hand(folder, files, weights="model"):
    """Probabilities of the weights of a run, without any of the engine."""
    model = build_model("test_resnet", 12, "linear", folder / f"{weights}.safetensors", dropout=0.1).eval()
    images = torch.stack([read_image(file, 32) for file in files]).permute(0, 3, 1, 2)
    found = read_decisions(folder, weights)
    with torch.inference_mode():
        logits = model(images.float().div(255))
        return logits.sigmoid() if found is None else (logits / found.temperature + found.shift).sigmoid()


def test_predict_writes_what_the_model_says(trained, tmp_path):
    folder = pictures(tmp_path / "pictures")
    single = folder / "0.png"
    for name in ("p.csv", "p.json"):
        arguments = ("predict", trained, folder, single, "--out", tmp_path / name, "--threads", 1)
        command = launch.good(tmp_path, *arguments)
        assert "3.png" in command.out
    files = [*sorted(folder.iterdir()), single]
    expected = by_hand(trained, files)
    with open(tmp_path / "p.csv", newline="") as file:
        heading, *rows = csv.reader(file)
    assert heading == ["image", *CATEGORIES, "predicted"]
    assert [row[0] for row in rows] == list(map(str, files))
    values = torch.tensor([[float(v) for v in row[1:-1]] for row in rows])
    torch.testing.assert_close(values, expected, rtol=0, atol=2e-6)
    by_name = json.loads((tmp_path / "p.json").read_text())
    assert list(by_name) == list(map(str, files[:-1]))
    for row, file in zip(values.tolist(), files, strict=True):
        assert by_name[str(file)] == dict(zip(CATEGORIES, row, strict=True)) | by_name[str(file)]
        assert list(by_name[str(file)].values()) == pytest.approx(row, abs=1e-6)
    # The likeliest category comes first on screen.
    line = next(line for line in command.out.splitlines() if "3.png" in line)
    assert CATEGORIES[int(expected[3].argmax())] in line.split(",")[0]


def test_predict_names_a_broken_image_and_goes_on(trained, tmp_path):
    folder = pictures(tmp_path / "pictures", 2)
    (folder / "bad.png").write_bytes(b"broken")
    command = launch.good(tmp_path, "predict", trained, folder, "--out", tmp_path / "p.json", "--threads", 1)
    assert f"skipped: {folder}/bad.png: cannot be decoded" in command.out
    assert len(json.loads((tmp_path / "p.json").read_text())) == 2
    command = launch.run(tmp_path, "predict", trained, folder / "bad.png", "--threads", 1)
    assert_one_line(command, "bad.png: cannot be decoded")


def test_evaluate_is_metrics_of_predictions(trained, tmp_path):
    out = tmp_path / "e.json"
    command = launch.good(tmp_path, "evaluate", trained, "--out", out, "--all", "--threads", 1)
    dataset = open_dataset("shapes", "val", 32, count=40)
    images, targets, _ = dataset[range(40)]
    model = build_model("test_resnet", 12, "linear", trained / "model.safetensors", dropout=0.1).eval()
    with torch.inference_mode():
        expected = metrics.evaluate(model(images.float().div(255)), targets)
    values = json.loads(out.read_text())
    assert values["images"] == 40
    assert values["mAP"] == pytest.approx(expected.mAP, abs=1e-6)
    for c, name in enumerate(CATEGORIES):
        if c in expected.left_out:
            assert name not in values["AP"]
        else:
            assert values["AP"][name] == pytest.approx(float(expected.AP[c]), abs=1e-6)
    assert f"mAP {expected.mAP:.2%} on 40 images" in command.out
    kept = next(line for line in read_log(trained) if line["kind"] == "end")
    assert kept["mAP"] == pytest.approx(expected.mAP, abs=1e-6)
    # Other data with the same categories, and another split.
    command = launch.good(tmp_path, "evaluate", trained, "--data", "shapes", "--split", "test", "--threads", 1)
    assert "on 40 images" in command.out


def test_fine_tuning_later_is_fine_tuning_in_fit(tmp_path):
    whole = tmp_path / "whole"
    cft = ("--cft-epochs", 40, "--cft-lr", 0.01)
    launch.good(tmp_path, *launch.SMALL, "-o", "count=200", "--epochs", 1, *cft, "--out", whole)
    later = shutil.copytree(whole, tmp_path / "later")
    for name in ("cft.safetensors", "cft.json", "cft_predictions.npz"):
        (later / name).unlink()
    before = (later / "model.safetensors").read_bytes()
    launch.good(tmp_path, "cft", later, "--threads", 1)  # with the options of the run
    assert (later / "model.safetensors").read_bytes() == before  # the weights as trained stay
    tuned, expected = (load_file(folder / "cft.safetensors") for folder in (later, whole))
    assert all(torch.equal(tuned[key], expected[key]) for key in expected)
    plain = load_file(whole / "model.safetensors")
    changed = {key for key in plain if not torch.equal(plain[key], expected[key])}
    assert changed == {"head.1.weight", "head.1.bias"}  # the heads, and nothing else
    records = [json.loads((folder / "cft.json").read_text()) for folder in (later, whole)]
    for record in records:
        del record["seconds"]
    assert records[0] == records[1]
    # evaluate takes those that the run kept unless told otherwise.
    for use, name in (((), kept_weights(whole)), (("--use", "model"), "model"), (("--use", "cft"), "cft")):
        assert f"{name}.safetensors" in launch.good(tmp_path, "evaluate", whole, *use, "--threads", 1).out


def test_fine_tuning_sees_known_labels_alone(tmp_path, monkeypatch):
    """Thresholds that turn every unknown label into a pseudo-label: none of them gets there."""
    seen = []

    def spy(features, labels, *rest, **options):
        seen.append(labels)
        return category_wise_fine_tune(features, labels, *rest, **options)

    monkeypatch.setattr(tuneblocks, "category_wise_fine_tune", spy)
    monkeypatch.setattr("gpu_logicmix.cli.runs.write_report", lambda folder: None)
    threads = torch.get_num_threads()
    code, text = run(*launch.SMALL, "--theta-pos", 0, "--theta-neg", 0, "--epochs", 2, "--out", tmp_path / "run")
    torch.set_num_threads(threads)
    assert code == 0, text
    table = read_checkpoint(tmp_path / "run" / "last.pt")["curriculum"]["table"]
    assert (table == -1).sum() == 0
    expected = hide_labels(open_dataset("shapes", "train", 32, count=40).labels, 0.5, 0)
    assert (seen[0] == expected).all()
    assert (expected == -1).any()


def test_real_data(shared, tmp_path):
    weights = shared / "weights" / "tf_efficientnet_lite0.safetensors"
    if not (shared / "data" / "coco-mini").is_dir() or not weights.exists():
        pytest.skip("no coco-mini or no weights")
    arguments = [
        "fit",
        f"coco:{shared / 'data' / 'coco-mini'}",
        "--model",
        "tf_efficientnet_lite0",
        "--weights",
        weights,
    ]
    arguments += ["--size", 64, "--images", 64, "--known", 0.5, "--epochs", 2, "--batch-size", 16, "--accumulate", 1]
    arguments += ["--holdout", 0.01, "--threads", 1, "--workers", 0, "--cft-epochs", 5, "--log-every", 1]
    launch.good(tmp_path, *arguments, "--out", tmp_path / "run")
    lines = read_log(tmp_path / "run")
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses) == 8
    assert all(loss is not None and 0 < loss < 10 for loss in losses)
    assert lines[-1]["kind"] == "end"
    assert 0 < lines[-1]["mAP"] < 1


# ------------------------------------------------------------------------------------------------------------ bad input
def assert_one_line(command, words, code=1):
    assert command.process.exitcode == code, command.text
    assert words in command.err
    assert command.err.startswith("error: ")
    assert command.err.count("\n") == 1
    assert "Traceback" not in command.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "resnet1O1"), "--model resnet1O1: timm has no such model; near are resnet101"),
        (("--known", "0"), "--known 0: must be above 0 and at most 1"),
        (("--known", "1.5"), "--known 1.5: must be above 0 and at most 1"),
        (("--known", "-1"), "--known -1: must be above 0 and at most 1"),
        (("--known", "nan"), "--known nan: must be"),
        (("--known", "1e-9"), "none is known to be present, there is nothing to learn from"),
        (("--weights", "/nowhere.pth"), "--weights /nowhere.pth: no such file"),
        (("--weights", __file__), "must be a .safetensors, .pth or .pt file"),
        (("--data-is-no-option",), None),
        (("--device", "nonsense"), "--device nonsense"),
        (("--device", "meta"), "--device meta"),
        (("--mix", "nonsense"), None),
        (("--epochs", "0"), "--epochs 0: must be at least 1"),
        (("--epochs", "many"), None),
        (("--val", "coco:/nowhere"), "/nowhere: no such file or folder"),
        (("--val", "folder:{tmp}"), "no images in it"),
        (("--option", "colour=red"), "option 'colour': shapes has the options count, seed"),
        (("--option", "size=3"), "--option 'size=3': not a dataset option; write --size 3"),
        (("--option", "size"), "option 'size': write NAME=VALUE"),
        (("--holdout", "0.001"), "--holdout 0.001: of 40 images that are 0; both parts need some"),
        (("--config", "/nowhere.toml"), "/nowhere.toml: no such file"),
        (("--freeze", "99"), "--freeze 99: must be 0 to"),
        (("--resume",), "no run to resume; start one without --resume"),
        (("--size", "8"), "--size 8: shapes cannot be told apart below 16"),
    ],
)
def test_bad_input_to_fit(tmp_path, arguments, words):
    arguments = [str(a).format(tmp=tmp_path) for a in arguments]
    command = launch.run(tmp_path, *launch.SMALL, "--out", tmp_path / "run", *cli._with_value(arguments))
    if words is not None:
        assert_one_line(command, words)
    else:  # Typer's own words: how the command is used, and what of it was wrong
        assert command.process.exitcode == 2, command.text
        assert arguments[0] in command.err
        assert "Traceback" not in command.err
    assert not list((tmp_path / "run").glob("*.pt"))


def test_weights_that_do_not_fit(trained, tmp_path):
    command = launch.run(
        tmp_path,
        *launch.SMALL,
        "--model",
        "test_vit",
        "--weights",
        trained / "model.safetensors",
        "--out",
        tmp_path / "r",
    )
    assert_one_line(command, "do not fit test_vit")


def small_csv(folder, labels):
    """A dataset of one's own: labels of two images to train on and two to validate on."""
    (folder / "img").mkdir(parents=True)
    heading, *rows = labels.splitlines()
    lines = [f"image,split,{heading}"]
    for number, row in enumerate(rows):
        Image.new("RGB", (40, 40), "red").save(folder / "img" / f"{number}.png")
        lines.append(f"img/{number}.png,{'train' if number < 2 else 'val'},{row}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return f"csv:{folder / 'labels.csv'}"


OWN = ("--size", 32, "--model", "test_resnet", "--weights", "none", "--epochs", 1, "--no-cft", "--workers", 0)


def test_datasets_that_cannot_be_trained_on(trained, tmp_path):
    def fit(data, *arguments):
        return launch.run(tmp_path, "fit", data, *OWN, "--out", tmp_path / "run", *arguments)

    assert_one_line(fit(small_csv(tmp_path / "empty", "cat,dog")), "labels.csv")
    absent = small_csv(tmp_path / "absent", "cat,dog\n0,0\n?,0\n1,1\n0,1")
    assert_one_line(fit(absent), "none is known to be present")
    cats = small_csv(tmp_path / "cats", "cat,dog\n1,0\n0,1\n1,1\n0,1")
    cows = small_csv(tmp_path / "cows", "cat,cow\n1,0\n0,1\n1,1\n0,1")
    assert_one_line(fit(cats, "--val", cows), "its categories are not those of")
    assert_one_line(fit(f"folder:{tmp_path / 'cats'}", "--val", cats), "has no labels to train with")
    assert_one_line(fit(f"folder:{tmp_path / 'run'}", "--val", cats), "no images in it")
    command = launch.run(tmp_path, "evaluate", trained, "--data", cats, "--threads", 1)
    assert_one_line(command, "its categories are not those that")
    # An image that cannot be read, by this process or by a worker.
    (tmp_path / "cats" / "img" / "1.png").write_bytes(b"broken")
    for workers in (0, 2):
        assert_one_line(fit(cats, "--workers", workers), f"error: {tmp_path}/cats/img/1.png: cannot be decoded")


def test_run_folders_that_cannot_be_used(trained, tmp_path):
    def fit(*arguments):
        return launch.run(tmp_path, *launch.SMALL, "--no-cft", *arguments)

    assert_one_line(fit("--out", trained), "there is a run already; resume it with --resume, or choose another --out")
    for arguments, words in (
        (("--model", "test_vit"), "its checkpoint was made with --model test_resnet, not 'test_vit'"),
        (("--lr", "1"), "its checkpoint was made with --lr 0.0002, not 1.0"),
        (("--seed", "1"), "its checkpoint was made with --seed 0, not 1"),
        (("--option", "seed=5"), "its checkpoint was made with --option"),
    ):
        assert_one_line(fit("--out", trained, "--resume", "must", *arguments), words)
    # Another dataset behind the same options.
    first = small_csv(tmp_path / "first", "cat,dog\n1,0\n0,1\n1,1\n0,1")
    second = small_csv(tmp_path / "second", "cat,dog\n1,1\n0,1\n1,1\n0,1")
    launch.good(tmp_path, "fit", first, *OWN, "--out", tmp_path / "own")
    again = ("--out", tmp_path / "own", "--resume", "auto")
    command = launch.run(tmp_path, "fit", second, *OWN, "--epochs", 2, *again)
    assert_one_line(command, "its checkpoint was made with --epochs 1, not 2")
    assert_one_line(launch.run(tmp_path, "fit", second, *OWN, *again), "its checkpoint belongs to another dataset")
    for name in ("evaluate", "predict", "cft"):
        command = launch.run(tmp_path, name, tmp_path, *([tmp_path] if name == "predict" else []))
        assert_one_line(command, "not a run (it has no config.toml)")
    shutil.copytree(trained, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    assert_one_line(launch.run(tmp_path, "evaluate", tmp_path / "half"), "the run has not ended; resume it")
    (tmp_path / "half" / "model.safetensors").write_bytes(b"nothing")
    assert_one_line(launch.run(tmp_path, "evaluate", tmp_path / "half"), "model.safetensors: damaged")
    assert_one_line(launch.run(tmp_path, "evaluate", trained, "--use", "cft"), "has no cft.safetensors")


def test_run_folder_in_use(tmp_path):
    with launch.Command(tmp_path, *launch.SMALL, "--epochs", 500, "--out", tmp_path / "run") as first:
        launch.until(lambda: (tmp_path / "run" / "log.jsonl").exists())
        second = launch.run(tmp_path, *launch.SMALL, "--epochs", 500, "--out", tmp_path / "run", "--resume", "auto")
        assert_one_line(second, f"in use by another process ({platform.node()}, process {first.process.pid})")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    launch.good(tmp_path, *launch.SMALL, "--epochs", 1, "--out", tmp_path / "other")


def test_ctrl_c_before_training(tmp_path):
    """While data is opened: no traceback, 130."""
    with launch.Command(tmp_path, *launch.SMALL, "--out", tmp_path / "run", hook=(slow_to_open,)) as command:
        launch.until(lambda: "opening" in command.err)
        command.signal(signal.SIGINT, group=True)
        assert command.wait() == 130
    assert "Traceback" not in command.text
    assert "stopped before the first checkpoint" in command.out
    launch.good(tmp_path, *launch.SMALL, "--out", tmp_path / "run")


def slow_to_open() -> None:
    def slow(*_):
        print("opening", file=sys.stderr, flush=True)
        time.sleep(60)

    loop.open_train = slow


def test_config_file_reaches_the_run(tmp_path):
    (tmp_path / "options.toml").write_text('epochs = 1\nmix = "mixup"\nlr = 0.001\nbatch_size = 4\n')
    start = launch.SMALL.index("--accumulate")
    launch.good(tmp_path, *launch.SMALL[:start], "--config", tmp_path / "options.toml", "--out", tmp_path / "run")
    options = read_toml(tmp_path / "run" / "config.toml")
    assert (options["epochs"], options["mix"], options["lr"], options["batch_size"]) == (1, "mixup", 0.001, 8)
    (tmp_path / "options.toml").write_text("epoch = 1\n")
    command = launch.run(tmp_path, "fit", "--config", tmp_path / "options.toml", "--out", tmp_path / "other")
    assert_one_line(command, "there is no option 'epoch'; did you mean epochs?")
