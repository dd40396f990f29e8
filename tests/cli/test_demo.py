"""demo.py: the real thing in miniature. Two runs that differ in one option, and a page that says what they gave."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from places import ROOT
from rich.console import Console

from gpu_logicmix import average_precision
from gpu_logicmix.cli import demo
from gpu_logicmix.errors import RunError
from gpu_logicmix.study.plan import read_study
from gpu_logicmix.train.checkpoint import locked
from gpu_logicmix.train.config import make_config
from gpu_logicmix.train.loop import fit
from gpu_logicmix.train.runlog import read_log

pytestmark = pytest.mark.slow  # a demo from start to end


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished demo: its folder, its page, and what was on screen."""
    threads = torch.get_num_threads()
    out = tmp_path_factory.mktemp("demo")
    console = Console(width=120, record=True, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    page = demo.run_demo(out, quick=True, console=console, threads=1)
    torch.set_num_threads(threads)
    return out, page.read_text(), console.export_text()


def test_the_two_runs_differ_in_the_mix_alone(done):
    out, *_ = done
    plain, logicmix = (asdict(make_config({}, file=out / name / "config.toml")) for name in ("plain", "logicmix"))
    assert {key for key in plain if plain[key] != logicmix[key]} == {"mix"}
    assert (plain["mix"], logicmix["mix"]) == ("none", "logicmix")
    assert plain["known"] == 0.5
    assert plain["keep"] == "last"
    first, second = (read_log(out / name) for name in ("plain", "logicmix"))
    assert first[0]["positives"] == second[0]["positives"]  # the same labels are hidden
    assert first[-1]["kind"] == second[-1]["kind"] == "end"


def test_prints_what_was_measured(done):
    out, page, screen = done
    mAP = {}
    for name in ("plain", "logicmix"):
        with np.load(out / name / "predictions.npz") as found:
            ap = average_precision(torch.from_numpy(found["logits"]), torch.from_numpy(found["targets"]))
        mAP[name] = 100 * ap.nanmean().item()
    gain = f"{mAP['logicmix'] - mAP['plain']:+.1f} pt"
    for text in (screen, page):
        for words in (f"{mAP['plain']:.1f}%", f"{mAP['logicmix']:.1f}%", gain):
            assert words in text, words
    for heading in ("plain training", "LogicMix", "difference", "CF1", "images/s", "This was --quick"):
        assert heading in screen
    assert "100 %" in screen


def test_the_setting_is_the_one_of_the_study():
    """The evidence is for what the demo runs."""
    planned = read_study(ROOT / "studies" / "demo.toml")
    assert {plan.seed for plan in planned} == {21, 22, 23, 24, 25}
    for plan in planned:
        name = {"plain training": "plain", "LogicMix": "logicmix"}[plan.method]
        own = asdict(demo.demo_configs(Path("x"), seed=plan.seed, device=None)[name])
        assert own | {"cache": None} == asdict(plan.config)


def test_the_verdict_is_what_the_curves_show():
    def verdict(plain, mixed):
        lines = {
            name: [{"epoch": 2 * at, **({} if y is None else {"mAP": y})} for at, y in enumerate(values, 1)]
            for name, values in (("plain", plain), ("logicmix", mixed))
        }
        return demo.verdict({name: demo.Run(Path(), epochs=epochs) for name, epochs in lines.items()})

    words = verdict([0.3, 0.4, 0.35, 0.33], [0.2, 0.45, 0.34, 0.4])
    assert words == "Plain training was at its best in epoch 4 (40.0\u00a0%); LogicMix is ahead from epoch 8 on."
    assert verdict([0.3, 0.4], [0.35, 0.4]).endswith("LogicMix is not ahead at the end.")
    assert verdict([0.3, None, 0.4], [0.5, None, 0.5]).endswith("LogicMix is ahead from epoch 2 on.")


def test_a_run_that_fails_is_one_line(tmp_path):
    with pytest.raises(RunError, match="no_such_model") as caught:
        demo.run_demo(tmp_path, quick=True, console=Console(quiet=True), model="no_such_model")
    assert len(str(caught.value).splitlines()) == 1


def test_figures_are_of_the_whole_run():
    epochs = [
        {"mAP": 0.3, "CF1": 0.2, "seconds": 1.0, "images_per_second": 100.0},
        {"seconds": 2.0, "images_per_second": 200.0},  # not validated
        {"mAP": 0.2, "CF1": 0.1, "seconds": 1.0, "images_per_second": 200.0},
    ]
    runs = {
        name: demo.Run(Path(), epochs=epochs[:count], end={"elapsed": 5.0 * count})
        for count, name in ((1, "plain"), (3, "logicmix"))
    }
    expected = {"mAP": 0.2, "CF1": 0.1, "highest": 0.3, "seconds": 15.0, "speed": 175.0}
    assert demo.figures(runs["logicmix"]) == expected
    assert demo.result_rows(runs) == [
        ("plain training", "30.0%", "30.0%", "20.0%", "5.0 s", "100"),
        ("LogicMix", "20.0%", "30.0%", "10.0%", "15.0 s", "175"),
        ("difference", "-10.0 pt", "+0.0 pt", "-10.0 pt", "+10.0 s", "+75"),
    ]


def test_page(done):
    out, page, _ = done
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 2
    for chart in charts:
        assert len(re.findall(r"<path", chart)) == 2  # both methods
    assert page.count("data:image/jpeg;base64,") == 16  # a batch before and after
    links = re.findall(r'<a href="(.*?)"', page)
    assert links == ["plain/report.html", "logicmix/report.html"]
    assert all((out / link).stat().st_size > 10_000 for link in links)
    assert not re.findall(r'(?:src|href)="http', page)


def test_again_starts_afresh_and_keeps_the_pictures(done, monkeypatch):
    out, *_ = done
    before = (out / "logicmix" / "log.jsonl").read_text()
    pictures = {file: file.stat().st_mtime_ns for file in (out / "cache").rglob("images.u8")}
    assert pictures
    threads = torch.get_num_threads()

    def train_here(configs, out, total, console):
        for name, config in configs.items():
            fit(config, out / name, console=Console(quiet=True))

    monkeypatch.setattr(demo, "_train", train_here)
    demo.run_demo(out, quick=True, console=Console(quiet=True), threads=1, seed=1)
    torch.set_num_threads(threads)
    after = (out / "logicmix" / "log.jsonl").read_text()
    assert after != before
    assert len([line for line in read_log(out / "logicmix") if line["kind"] == "start"]) == 1
    assert {file: file.stat().st_mtime_ns for file in (out / "cache").rglob("images.u8")} == pictures


def test_removes_nothing_that_is_not_its_own(tmp_path):
    mine = tmp_path / "plain" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("years of work")
    with pytest.raises(RunError, match="choose another --out"):
        demo.run_demo(tmp_path, quick=True, console=Console(quiet=True))
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("command", ["gpu-logicmix fit shapes --out plain", "", None])
def test_a_run_of_the_users_is_not_removed(tmp_path, monkeypatch, command):
    """It has a lock and a log as those of a demo have; so has a demo's that was trained on with fit --resume."""
    monkeypatch.setattr(demo, "open_train", lambda config: pytest.fail("went on"))
    for name, commands in (("plain", [demo.COMMAND]), ("logicmix", [demo.COMMAND, command] if command else [command])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        lines = [json.dumps({"kind": "start", "command": one}) for one in commands]
        (tmp_path / name / "log.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=r"logicmix: in the way.*choose another --out"):
        demo.run_demo(tmp_path, quick=True, console=Console(quiet=True))
    assert all((tmp_path / name / "log.jsonl").exists() for name in ("plain", "logicmix"))  # also the demo's own


@pytest.mark.parametrize("names", [(), ("lock",), ("lock", "config.toml")])
def test_what_a_stopped_demo_has_left_is_removed(tmp_path, monkeypatch, names):
    class GoesOnError(Exception):
        pass

    def goes_on(config):
        raise GoesOnError

    monkeypatch.setattr(demo, "open_train", goes_on)
    (tmp_path / "plain").mkdir()
    for name in names:
        (tmp_path / "plain" / name).write_text("")
    with pytest.raises(GoesOnError):
        demo.run_demo(tmp_path, quick=True, console=Console(quiet=True))
    assert not (tmp_path / "plain").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="in use by another process"):
        demo.run_demo(tmp_path, quick=True, console=Console(quiet=True))


def test_train_py_alone_is_the_demo(monkeypatch):
    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda out, **options: calls.append((out, options["quick"])))
    assert run()[0] == 0
    assert run("demo", "--quick", "--out", "x")[0] == 0
    assert run("--help")[0] == 0
    assert calls == [(Path("demo"), False), (Path("x"), True)]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_ends_it_without_a_traceback(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "demo", "--out", str(tmp_path), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        until = time.monotonic() + 300
        while not (tmp_path / "cache").exists() and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert "starts the demo again" in text
