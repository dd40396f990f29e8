"""The benchmark of labels at OpenImages' size, at a thousandth of it."""

import json
import sys

import pytest


def test_script(script, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    bench = script("bench/labels.py")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["labels.py", "--share", "0.001"])
    bench.main()
    report = json.loads((tmp_path / "labels.json").read_text())
    again = report["again"]
    assert 0.9 * report["made"]["rows"] < again["known"] <= report["made"]["rows"]
    assert again["hide uniform"]["known"] == pytest.approx(0.3 * again["known"], rel=0.05)
    assert set(again) >= {"open", "labels_of 256", "table 256", "fingerprint", "GB"}
