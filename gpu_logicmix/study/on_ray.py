"""The runs of a study as tasks of a Ray cluster: `gpu-logicmix study FILE --on ray`.

Every run is a task with its CPUs and GPUs, on whatever node has them free. It trains in a folder of its node and sends
that folder's files to the machine where the study was started, at each checkpoint and at the end; no file system has to
be shared. There they are in OUT/runs as if the run had been done there. When a node is lost, Ray starts its tasks on
another one, and these fetch the last checkpoint and resume, exactly. When the study itself is stopped, the same command
continues.

The nodes need this package and the data, under the same path. Ray finds the cluster as always: by RAY_ADDRESS, or the
one that `ray start` has started on this machine; without one it starts its own with all that this machine has.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_logicmix.errors import RunError, shown
from gpu_logicmix.files import written_whole
from gpu_logicmix.machine import keep_memory
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.report.words import percent
from gpu_logicmix.study.plan import Planned, left_to_do, run_sizes, run_words
from gpu_logicmix.study.results import collect
from gpu_logicmix.train.config import Config, located
from gpu_logicmix.train.loop import fit

RETRIES = 5  # of a run whose node or process is lost; each resumes
SENT_LAST = "last.pt"  # what a checkpoint needs is there before it
NOT_SENT = ("lock", "next.pt", "previous.pt")


def ray_module() -> Any:
    try:
        import ray
    except ImportError as error:
        raise RunError(f"--on ray: cannot import Ray ({error}); pip install ray") from None
    return ray


class Store:
    """Of the machine that started the study: the folders of its runs. An actor; one call at a time."""

    def __init__(self, runs: str) -> None:
        self.runs, self.done = Path(runs), {}

    def fetch(self, run: str) -> dict[str, bytes]:
        """What there is of a run."""
        return read_files(self.runs / run)

    def put(self, run: str, files: dict[str, bytes]) -> None:
        folder = self.runs / run
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(files, key=lambda name: name == SENT_LAST):
            with written_whole(folder / name, "wb") as file:
                file.write(files[name])

    def tell(self, run: str, images: int) -> None:
        self.done[run] = images

    def told(self) -> dict[str, int]:
        return self.done


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a run's folder that are worth keeping."""
    paths = folder.iterdir() if folder.exists() else ()
    return {path.name: path.read_bytes() for path in paths if path.is_file() and path.name not in NOT_SENT}


class Sender:
    """Is told of images that were worked through, between two steps: then the folder stands still, and what is in it
    belongs together. Sends it when there is a new checkpoint."""

    def __init__(self, ray: Any, store: Any, run: str, folder: Path) -> None:
        self.ray, self.store, self.run, self.folder = ray, store, run, folder
        self.images, self.told, self.sent = 0, 0, self._stamp()

    def _stamp(self) -> int:
        last = self.folder / "last.pt"
        return last.stat().st_mtime_ns if last.exists() else 0

    def __call__(self, images: int) -> None:
        self.images += images
        if self._stamp() != self.sent:
            self.send()
        if self.images >= self.told + 1000:
            self.told = self.images
            self.store.tell.remote(self.run, self.images)

    def send(self) -> None:
        self.sent = self._stamp()
        self.ray.get(self.store.put.remote(self.run, read_files(self.folder)))


def train_there(store: Any, config: Config, run: str) -> dict[str, Any]:
    """The task: on any node. Returns the last line of the run's log, or `error`."""
    ray = ray_module()
    keep_memory()
    with tempfile.TemporaryDirectory(prefix="gpu-logicmix-") as scratch:
        folder = Path(scratch) / run
        folder.mkdir()
        for name, content in ray.get(store.fetch.remote(run)).items():
            (folder / name).write_bytes(content)
        sender = Sender(ray, store, run, folder)
        try:
            end = fit(config, folder, resume="auto", console=Console(quiet=True), tick=sender)
        except (RunError, ValueError, OSError) as error:
            return {"error": str(error).replace(f"{folder}", run)}
        sender.send()
        return end


def run_on_ray(
    planned: Sequence[Planned],
    out: str | Path,
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    console: Console | None = None,
) -> list[str]:
    """Do what is not done yet on a Ray cluster. Returns a line for each run that failed.

    cpus: of each run; as many as the run's threads unless given. gpus: 1 unless given, if the cluster has any.
    """
    ray, out, console = ray_module(), Path(out), console or Console()
    todo = left_to_do(planned, out)
    if not todo:
        return []
    sizes = dict(zip((plan.folder for plan in todo), run_sizes(todo), strict=True))
    with _joined(ray), progress_bar(sum(sizes.values()), "study", console=console, period=3600.0) as bar:
        found = ray.cluster_resources()
        needs = [(p, _needs(p.config, cpus, gpus, found.get("GPU", 0.0))) for p in todo]
        for plan, (cores, devices) in needs:
            _check(ray, cores, devices, run_words(plan))
        nodes = f"{len(ray.nodes())} nodes, {found.get('CPU', 0):g} CPUs, {found.get('GPU', 0):g} GPUs"
        console.print(f"{len(todo)} runs on Ray: {nodes}", highlight=False)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        store = ray.remote(num_cpus=0, scheduling_strategy=here)(Store).remote(str((out / "runs").absolute()))
        task = ray.remote(max_retries=RETRIES)(train_there)
        tasks = {
            task.options(num_cpus=cores, num_gpus=devices).remote(store, located(plan.config), plan.folder): plan
            for plan, (cores, devices) in needs
        }
        return _gather(ray, tasks, store, sizes, lambda: collect(planned, out, pictures=False), bar, console)


@contextlib.contextmanager
def _joined(ray: Any) -> Iterator[None]:
    """Connected to the cluster, which stays as it was if it was there before."""
    before = ray.is_initialized()
    if not before:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def _needs(config: Config, cpus: float | None, gpus: float | None, there: float) -> tuple[float, float]:
    wants = 1.0 if there and config.device in ("auto", "cuda") else 0.0
    return (config.threads or 1) if cpus is None else cpus, wants if gpus is None else gpus


def _check(ray: Any, cpus: float, gpus: float, words: str) -> None:
    """Ray would wait for ever for a node that large."""
    sizes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(size.get("CPU", 0) >= cpus and size.get("GPU", 0) >= gpus for size in sizes):
        raise RunError(f"{words}: no node has {cpus:g} CPUs and {gpus:g} GPUs; use smaller --cpus and --gpus")


def _gather(ray: Any, tasks: dict, store: Any, sizes: dict[str, int], ended: Any, bar: Any, console: Console) -> list:
    failed, over, left = [], set(), list(tasks)
    while left:
        ready, left = ray.wait(left, timeout=2.0)
        for one in ready:
            plan = tasks[one]
            text, why = _outcome(ray, one, plan)
            failed += [why] if why else []
            over.add(plan.folder)
            console.print(f"[red]{shown(why)}[/]" if why else shown(text), highlight=False, soft_wrap=True)
            ended()
        told = ray.get(store.told.remote())
        done = {run: size if run in over else min(told.get(run, 0), size) for run, size in sizes.items()}
        bar.set(f"{len(over)} of {len(tasks)} runs", sum(done.values()))
    return failed


def _outcome(ray: Any, task: Any, plan: Planned) -> tuple[str, str | None]:
    """What a run that is over gave, in words, or why it failed."""
    words = run_words(plan)
    try:
        end = ray.get(task)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        return "", f"{words}: lost on the cluster ({type(error).__name__}: {reason})"
    if "error" in end:
        return "", f"{words}: {end['error']}"
    return f"{words}: mAP {percent(end.get('mAP'), 2)}, {end['elapsed'] / 60:.1f} minutes", None
