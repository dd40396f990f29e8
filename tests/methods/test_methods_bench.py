"""bench/methods.py on tiny sizes."""

import json


def test_the_benchmark_of_methods(script, tmp_path):
    bench = script("bench/methods.py")
    small = ["--model", "test_resnet", "--size", "64", "--batch", "2", "--categories", "5", "--rounds", "1"]
    out = tmp_path / "methods.json"
    result = bench.main([*small, "--semantic-option", "width=8", "joint=4", "out=8", "--out", str(out)])
    assert list(result["steps"]) == list(bench.METHODS)
    assert result["steps"]["linear"]["ratio"] == 1
    assert json.loads(out.read_text())["steps"] == result["steps"]
