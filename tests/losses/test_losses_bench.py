"""bench/losses.py on tiny sizes."""

import json

from gpu_logicmix.losses import LOSSES


def test_every_loss_is_measured(script, tmp_path, capsys):
    out = tmp_path / "losses.json"
    bench = script("bench/losses.py")
    bench.main(["--rounds", "1", "--size", "4x6", "--out", str(out)])
    bench.main(["--rounds", "1", "--size", "2x3", "--out", str(out)])
    sizes = json.loads(out.read_text())["sizes"]
    assert list(sizes) == ["4x6", "2x3"]
    rows = sizes["4x6"]["losses"]
    assert set(rows) == set(LOSSES.names())
    assert rows["bce"]["of_bce"] == 1
    assert all(row["ms"] > 0 for row in rows.values())
    assert {name for name in rows if rows[name]["mlcpl_ms"]} == {"bce", "focal", "asl", "csl", "ll-r", "ll-ct"}
    assert "mlcpl / ours" in capsys.readouterr().out
