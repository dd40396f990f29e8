"""The benchmark of labels at OpenImages' size, at a thousandth of it."""

import json
import sys

import pytest


@pytest.mark.slow
def test_script(script, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    bench = script("bench/labels.py")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    # In this process: that each part has its own is a matter of measuring.
    monkeypatch.setattr(bench, "child", lambda part, folder: json.loads(json.dumps(bench.PARTS[part](folder))))
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path / "index"))
    monkeypatch.setattr(bench, "SLICE", 24)
    monkeypatch.setattr(bench, "STEPS", 6)
    monkeypatch.setattr(sys, "argv", ["labels.py", "--share", "0.0002"])
    bench.main()
    report = json.loads((tmp_path / "labels.json").read_text())
    again = report["again"]
    assert 0.9 * report["made"]["rows"] < again["known"] <= report["made"]["rows"]
    assert again["hide uniform"]["known"] == pytest.approx(0.3 * again["known"], rel=0.05)
    assert set(again) >= {"open", "labels_of 256", "table 256", "fingerprint", "GB"}
    assert [len(report["train"][kind]) for kind in ("epoch", "curriculum")] == [2, 1]
    assert (report["csv"]["rows"], report["csv"]["columns"]) == (200, 80)
    assert report["csv_stats"]["seconds"] > 0
