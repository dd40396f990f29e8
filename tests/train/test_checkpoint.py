"""checkpoint.py and runlog.py: files are whole or not there, damage is noticed, one process has the folder."""

import json
import math
import os
import random

import numpy as np
import pytest
import torch
from launch import CONTEXT, serve
from runs import a_run, step_through

from gpu_logicmix import build_model
from gpu_logicmix.data import open_dataset
from gpu_logicmix.errors import RunError
from gpu_logicmix.train.checkpoint import (
    load_optimizer,
    locked,
    read_checkpoint,
    read_last,
    restore,
    save_checkpoint,
    state_of,
    write_checkpoint,
    write_model,
    write_predictions,
)
from gpu_logicmix.train.runlog import Log, no_nan, read_log


def state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((50, 50), float(step))}, "config": {"option": ["a"]}}


# ---------------------------------------------------------------------------------------------------------- checkpoints
def test_the_one_before_is_kept(tmp_path):
    warnings = []
    assert read_last(tmp_path, warnings.append) is None
    for step in range(3):
        save_checkpoint(tmp_path, state(step))
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "previous.pt"]
    assert read_last(tmp_path, warnings.append)["step"] == 2
    assert read_checkpoint(tmp_path / "previous.pt")["step"] == 1
    assert not warnings
    (tmp_path / "last.pt").unlink()  # as in a kill between the two renamings
    assert read_last(tmp_path, warnings.append)["step"] == 1
    assert not warnings


def test_any_damage_is_noticed(tmp_path):
    """A flipped bit anywhere in the file, or a cut anywhere: it says so, or what it gives is what was saved."""
    file, chance = tmp_path / "last.pt", random.Random(0)
    write_checkpoint(file, state(3))
    whole = file.read_bytes()
    noticed = []
    for _ in range(150):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            assert torch.equal(read_checkpoint(file)["model"]["weight"], torch.full((50, 50), 3.0))
        except RunError as error:
            noticed.append(str(error))
    assert len(noticed) > 100
    assert all(line.startswith(f"{file}: damaged (") and "\n" not in line for line in noticed)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(RunError, match="damaged"):
            read_checkpoint(file)


def test_file_that_is_no_checkpoint(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "last.pt")
    with pytest.raises(RunError, match="not a checkpoint of a run"):
        read_checkpoint(tmp_path / "last.pt")


def test_fall_back_with_a_warning(tmp_path):
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    (tmp_path / "last.pt").write_bytes(b"")
    warnings = []
    assert read_last(tmp_path, warnings.append)["step"] == 1
    assert len(warnings) == 1
    assert "last.pt: damaged" in warnings[0]
    assert "previous.pt, step 1" in warnings[0]
    (tmp_path / "previous.pt").write_bytes(b"")
    with pytest.raises(RunError, match=r"last\.pt: damaged .*, and there is no other"):
        read_last(tmp_path, warnings.append)


def test_what_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, state(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"next\.pt: cannot be written \(No space left on device\); what was saved"):
        save_checkpoint(tmp_path, state(2))
    model = build_model("test_vit", 3, image_size=32)
    with pytest.raises(RunError, match=r"model\.safetensors: cannot be written"):
        write_model(tmp_path / "model.safetensors", model, ["a", "b", "c"])
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["last.pt"]
    assert read_last(tmp_path, pytest.fail)["step"] == 1


def test_counters_of_steps_move_to_the_device_that_fuses():
    """A run that began on a CPU resumes on a GPU, whose fused step reads its counters there."""
    here, there = (torch.nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta"))
    before, after = (torch.optim.AdamW([parameter]) for parameter in (here, there))
    here.grad = torch.ones(2)
    before.step()
    after.param_groups[0]["fused"] = True
    load_optimizer(after, before.state_dict())
    assert {value.device.type for value in after.state[there].values()} == {"meta"}
    assert after.param_groups[0]["fused"]


def test_resumes_in_float16_what_began_without_a_scale(tmp_path):
    """As on a GPU that has no bfloat16, with --amp auto."""
    run = a_run(tmp_path, amp="fp16")
    step_through(run, 2)
    saved = {**state_of(run), "totals": torch.zeros(2, dtype=torch.float64), "scaler": {}}
    again = a_run(tmp_path, amp="fp16")
    restore(again, saved)
    assert again.step == 2
    assert again.scaler.is_enabled()
    step_through(again, 1)


# ----------------------------------------------------------------------------------------------------------------- lock
def try_lock(folder, queue) -> None:
    try:
        with locked(folder):
            queue.put("mine")
    except RunError as error:
        queue.put(str(error))


def from_another_process(folder) -> str:
    serve()
    queue = CONTEXT.Queue()
    process = CONTEXT.Process(target=try_lock, args=(folder, queue))
    process.start()
    answer = queue.get(timeout=60)
    process.join()
    return answer


def test_one_process_has_the_folder(tmp_path):
    with locked(tmp_path):
        answer = from_another_process(tmp_path)
        assert answer.startswith(f"{tmp_path}: in use by another process (")
        assert f"process {os.getpid()})" in answer
        with pytest.raises(RunError, match="in use by another process"), locked(tmp_path / "." / ""):
            pass
        assert from_another_process(tmp_path) != "mine"  # the attempt has not opened it
    assert from_another_process(tmp_path) == "mine"


# ------------------------------------------------------------------------------------------------------------------ log
def test_log_forgets_what_came_after_the_checkpoint(tmp_path):
    log = Log(tmp_path, True, False)
    log.write("start", time="now")
    for epoch in (1, 2):
        for step in (1, 2):
            log.write("step", step=2 * epoch - 2 + step, epoch=epoch - 1 + step / 2, loss=0.5)
        log.write("curriculum", epoch=epoch, positives=3)
        log.write("epoch", epoch=epoch, step=2 * epoch, **({"mAP": 0.5} if epoch == 1 else {}))
    log.write("end", epoch=2)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"kind": "st')  # a kill
    assert len(read_log(tmp_path)) == 10
    assert (tmp_path / "epochs.csv").read_text().split() == ["epoch,step,mAP", "1,2,0.5", "2,4,"]
    log.rewind(step=3, closed=1)
    kinds = [(line["kind"], line.get("step", line.get("epoch"))) for line in read_log(tmp_path)]
    assert kinds == [("start", None), ("step", 1), ("step", 2), ("curriculum", 1), ("epoch", 2), ("step", 3)]
    log.write("step", step=4, loss=math.inf)
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["loss"] is None


def test_other_processes_write_no_log(tmp_path):
    log = Log(tmp_path, False, True)
    log.write("epoch", epoch=1)
    log.rewind(0, 0)
    assert os.listdir(tmp_path) == []


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    log = Log(tmp_path, True, True)
    log.write("step", step=1, loss=0.5)
    assert any((tmp_path / "tensorboard").iterdir())


def test_no_nan():
    assert no_nan({"a": [math.nan, 1.0, (math.inf,)], "b": "x", "c": True}) == {
        "a": [None, 1.0, [None]],
        "b": "x",
        "c": True,
    }


# ---------------------------------------------------------------------------------------------------------- predictions
def test_predictions_say_which_image_they_are_of(tmp_path):
    dataset = open_dataset("shapes", "val", 32, count=5)
    logits = torch.randn(5, 12)
    write_predictions(tmp_path / "p.npz", logits, np.array([0, 2, 4]), dataset)
    with np.load(tmp_path / "p.npz") as saved:
        assert np.array_equal(saved["logits"], logits[[0, 2, 4]].numpy())
        assert np.array_equal(saved["targets"], dataset.labels[[0, 2, 4]])
        assert saved["ids"].tolist() == ["val-0", "val-2", "val-4"]
        assert saved["categories"].tolist() == dataset.categories
