"""Experiment trackers: the real packages, offline, hold the numbers of the log."""

import sys

import pytest
from commands import run as command

from gpu_logicmix.errors import RunError
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.runlog import Log, read_log
from gpu_logicmix.train.trackers import open_trackers

OPTIONS = (
    "-o count=24 --size 32 --model test_resnet --weights none --epochs 2 --batch-size 8 --workers 0 --threads 1 "
    "--no-cft --no-cl --no-decisions --no-randaugment --log-every 1"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")


def epochs_of(folder):
    return [line for line in read_log(folder) if line["kind"] == "epoch"]


def test_a_run_in_mlflow_and_tensorboard(tmp_path):
    pytest.importorskip("mlflow")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    code, output = command(
        "fit", "shapes", *OPTIONS.split(), "--out", folder, "--log-to", "mlflow", "--log-to", "tensorboard"
    )
    assert code == 0, output
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("gpu-logicmix").experiment_id])
    wanted = [(line["step"], line["mAP"]) for line in epochs_of(folder)]
    history = client.get_metric_history(run.info.run_id, "epoch/mAP")
    assert [(point.step, point.value) for point in history] == wanted
    assert run.info.status == "FINISHED"
    assert run.data.params["model"] == "test_resnet"
    board = events.EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("epoch/mAP")] == [pytest.approx(pair) for pair in wanted]


def test_weights_and_biases_offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    log = Log(tmp_path, True, False, ["wandb"], {"lr": 0.1})
    for step in (1, 2):
        log.write("step", step=step, epoch=0.5, loss=1 / step)
    log.write("end", mAP=0.5)
    wandb.teardown()  # its process has written all
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = written.read_bytes()
    assert b"step/loss" in data
    assert b"0.5" in data


def test_a_run_that_resumes_is_one_run_of_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    for step in (1, 2):
        log = Log(tmp_path, True, False, ["mlflow"], {"lr": 0.1})
        log.write("step", step=step, epoch=0.5, loss=1 / step)
        log.write("end", mAP=0.5)
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("gpu-logicmix").experiment_id])
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5)]
    assert run.info.status == "FINISHED"


def test_what_is_not_installed(tmp_path, monkeypatch):
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(RunError, match=f"{name} is not installed .*pip install"):
            open_trackers([name], tmp_path, {})
    with pytest.raises(ValueError, match="log_to='comet': must be one of tensorboard, wandb, mlflow"):
        Config(log_to=["comet"])


def test_none_is_opened_where_none_is_asked_for(tmp_path):
    assert Log(tmp_path, True, False).trackers == []
    assert Log(tmp_path, False, True, ["wandb"]).trackers == []  # other processes of a run
