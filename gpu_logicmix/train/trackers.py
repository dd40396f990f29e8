"""Experiment trackers, each imported only when asked for: `--log-to tensorboard`, `wandb`, `mlflow`.

None of them needs a network: TensorBoard and MLflow write into the run folder, Weights & Biases works offline (`wandb
sync` sends it later). Their own environment variables choose otherwise: WANDB_MODE=online, MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_logicmix.errors import RunError

TRACKERS = ("tensorboard", "wandb", "mlflow")


def open_trackers(names: Sequence[str], folder: Path, options: dict[str, Any]) -> list[Any]:
    """Trackers for a run. Each has `log(values, step)` and `close()`."""
    opened = []
    for name in dict.fromkeys(names):
        kind = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}[name]
        try:
            opened.append(kind(folder, options))
        except ImportError as error:
            raise RunError(f"{name} is not installed ({error}): pip install {name}") from None
    return opened


def _same(folder: Path) -> str:
    """What a run is known by when it resumes."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]


class TensorBoard:
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gpu-logicmix"),
            name=folder.name,
            id=_same(folder),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(folder.absolute()),
            config=options,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        # Since 3.13 a folder must be asked for; it is what needs no server.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        own = (folder.absolute() / "mlruns").as_uri()
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
        found = self.client.get_experiment_by_name("gpu-logicmix")
        experiment = found.experiment_id if found else self.client.create_experiment("gpu-logicmix")
        before = self.client.search_runs([experiment], f"tags.folder = '{_same(folder)}'")
        if before:
            self.run = before[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(experiment, tags={"folder": _same(folder)}, run_name=folder.name).info.run_id
        for name, value in options.items():
            self.client.log_param(self.run, name, str(value)[:500])

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)
