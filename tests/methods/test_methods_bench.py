"""bench/methods.py and bench/presets.py on tiny sizes."""

import json
import subprocess
import sys

from places import ROOT


def test_the_benchmark_of_methods(script, tmp_path):
    bench = script("bench/methods.py")
    small = ["--model", "test_resnet", "--size", "64", "--batch", "2", "--categories", "5", "--rounds", "1"]
    out = tmp_path / "methods.json"
    result = bench.main([*small, "--semantic-option", "width=8", "joint=4", "out=8", "--out", str(out)])
    assert list(result["steps"]) == list(bench.METHODS)
    assert result["steps"]["linear"]["ratio"] == 1
    assert json.loads(out.read_text())["steps"] == result["steps"]


def test_a_step_of_a_preset_in_a_process_of_its_own(tmp_path):
    out = tmp_path / "presets.json"
    small = ["--only", "ssgrl-coco", "--size", "64", "--batch-size", "2", "--categories", "5", "--out", str(out)]
    subprocess.run([sys.executable, ROOT / "bench" / "presets.py", *small], check=True, capture_output=True)
    (row,) = json.loads(out.read_text())["steps"].values()
    assert (row["model"], row["batch"], row["size"], row["categories"]) == ("resnet101", 2, 64, 5)
    assert row["finite"]
    assert row["seconds"] > 0
    assert row["gigabytes"] > 0.15  # the weights alone
