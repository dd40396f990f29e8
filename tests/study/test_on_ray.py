"""A study on a Ray cluster of two nodes, one of which is lost in the middle."""

import builtins
import json
import threading
import time

import commands
import pytest
import torch
from places import ROOT
from safetensors.torch import load_file
from test_study import TINY

from gpu_logicmix.study import on_ray
from gpu_logicmix.study.on_ray import Store, read_files, run_on_ray
from gpu_logicmix.study.plan import read_study, run_study
from gpu_logicmix.study.results import collect
from gpu_logicmix.train.config import Config


def two_runs(folder, epochs):
    """One proportion, one seed, with and without LogicMix."""
    text = TINY.split("[[table]]")[0].replace("epochs = 2", f"epochs = {epochs}", 1)
    text += '[[table]]\nknown = 0.3\n[table.methods]\nnone = { mix = "none" }\nLogicMix = { mix = "logicmix" }\n'
    (folder / "two.toml").write_text(text)
    return folder / "two.toml"


def test_the_store_keeps_what_a_checkpoint_needs(tmp_path):
    store = Store(str(tmp_path / "runs"))
    assert store.fetch("r") == {}
    store.put("r", {"last.pt": b"1", "log.jsonl": b"2"})
    (tmp_path / "runs" / "r" / "lock").write_text("")
    assert store.fetch("r") == {"last.pt": b"1", "log.jsonl": b"2"} == read_files(tmp_path / "runs" / "r")
    store.tell("r", 64)
    assert store.told() == {"r": 64}


def test_mistakes(tmp_path, monkeypatch):
    file = two_runs(tmp_path, 2)
    for arguments, words in (
        (("--shard", "0/2", "--on", "ray"), "--shard: not with --on ray"),
        (("--cpus", "2"), "--cpus and --gpus belong to --on ray"),
    ):
        code, output = commands.run("study", file, "--out", tmp_path / "out", *arguments)
        assert code == 1
        assert words in output
    real = builtins.__import__

    def no_ray(name, *rest, **named):
        if name == "ray":
            raise ImportError("no module of that name")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", no_ray)
    with pytest.raises(ValueError, match=r"cannot import Ray .*pip install ray"):
        on_ray.ray_module()


@pytest.mark.parametrize("error", [ValueError("the model has no layer x"), OSError("r: disk full")])
def test_a_run_that_fails_says_why(monkeypatch, error):
    """As a study that runs here does: not as a task that was lost on the cluster."""

    class Ray:
        get = staticmethod(lambda answer: answer)

    class Fetch:
        remote = staticmethod(lambda run: {})

    def fails(config, folder, **options):
        raise type(error)(f"{folder}/last.pt: {error}")

    monkeypatch.setattr(on_ray, "ray_module", lambda: Ray)
    monkeypatch.setattr(on_ray, "fit", fails)
    store = type("Handle", (), {"fetch": Fetch})
    assert on_ray.train_there(store, Config(data="shapes"), "r") == {"error": f"r/last.pt: {error}"}


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one CPU each, the first with the driver on it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the workers' package is this one
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**size, "_system_config": soon})
    made.add_node(**{name: value for name, value in size.items() if name != "include_dashboard"})
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def lines(folder, kind):
    file = folder / "log.jsonl"
    text = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, text) if line["kind"] == kind]


@pytest.mark.slow
def test_a_lost_nodes_run_is_resumed_elsewhere(tmp_path, cluster):
    planned = read_study(two_runs(tmp_path, 24))
    here, there = tmp_path / "here", tmp_path / "there"
    folders = [there / "runs" / plan.folder for plan in planned]
    failed = []
    study = threading.Thread(target=lambda: failed.extend(run_on_ray(planned, there)))
    study.start()
    deadline = time.monotonic() + 240
    while not all(len(lines(folder, "epoch")) >= 2 for folder in folders):  # both under way, each on its node
        assert study.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (second,) = cluster.worker_nodes
    cluster.remove_node(second, allow_graceful=False)
    assert all(not lines(folder, "end") for folder in folders)  # neither was over
    study.join()
    assert failed == []
    # One of them began twice, the second time from a checkpoint: a run that starts anew forgets the log of the first.
    assert sorted(len(lines(folder, "start")) for folder in folders) == [1, 2]
    for folder in folders:
        assert [line["epoch"] for line in lines(folder, "epoch")] == list(range(1, 25))
    # All of it is here, and is what this machine alone would have made, to the bit.
    assert run_study(planned, here) == []
    same = [[row._replace(minutes=0) for row in collect(planned, out)] for out in (here, there)]
    assert same[0] == same[1]
    for plan in planned:
        one, other = (load_file(out / "runs" / plan.folder / "model.safetensors") for out in (here, there))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert run_on_ray(planned, there) == []  # nothing is left to do
