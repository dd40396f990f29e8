"""Runs on shards: killed and resumed, on two ranks over HTTP, and on two machines that are network namespaces."""

import contextlib
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from launch import PLAIN, SMALL, Command, good, ranks, until
from PIL import Image
from places import ROOT
from safetensors.torch import load_file
from served import serving

from gpu_logicmix.data import open_dataset, pack_dataset
from gpu_logicmix.train.runlog import read_log

LINKS = ("glm-test-a", "glm-test-b")  # names of namespaces, bridge and cables: at most 15 letters


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """The same images in files with a table, and in shards."""
    root = tmp_path_factory.mktemp("trees")
    for split in ("train", "val"):
        shapes = open_dataset("shapes", split, 32, count=40)
        names = [f"{split}/{i:02d}.png" for i in range(len(shapes))]
        (root / "files" / split).mkdir(parents=True)
        for i, name in enumerate(names):
            Image.fromarray(shapes[i][0].permute(1, 2, 0).numpy()).save(root / "files" / name)
        lines = [",".join([name, *map(str, row)]) for name, row in zip(names, np.asarray(shapes.labels), strict=True)]
        (root / "files" / f"{split}.csv").write_text(
            "\n".join([",".join(["image", *shapes.categories]), *lines]) + "\n"
        )
        pack_dataset(open_dataset(f"csv:{root / 'files'}", split, 32), root / "shards", per_shard=7)
    return root


def on(data, arguments):
    """A command on other data."""
    start = arguments.index("shapes")
    assert arguments[start + 1] == "-o"
    return [*arguments[:start], data, *arguments[start + 3 :]]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(ours, theirs, atol=0.0):
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=atol) for key in theirs)


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path / "index"))


def test_killed_and_resumed_on_shards(trees, tmp_path):
    """The weights of an uninterrupted run on the files, bit for bit."""
    good(tmp_path, *on(f"csv:{trees / 'files'}", SMALL), "--out", tmp_path / "whole")
    run, place = tmp_path / "run", {"GPU_LOGICMIX_INDEX": tmp_path / "index"}
    arguments = (*on(f"tar:{trees / 'shards'}", SMALL), "--save-every", "1e-9", "--out", run)
    steps = lambda: max((line["step"] for line in read_log(run) if line["kind"] == "step"), default=0)  # noqa: E731
    for after in (2, 8):
        with Command(tmp_path, *arguments, "--resume", "auto", **place) as command:
            until(lambda after=after: steps() >= after, what=command.text)
            command.process.kill()
            command.process.join()
    assert not (run / "model.safetensors").exists()
    good(tmp_path, *arguments, "--resume", "auto", **place)
    same(weights(run), weights(tmp_path / "whole"))


def test_two_ranks_over_http_are_one_process_on_files(trees, tmp_path):
    """Bit for bit those of two ranks on the files; those of one process up to the order of a sum."""
    pytest.importorskip("aiohttp")
    files = on(f"csv:{trees / 'files'}", PLAIN)
    good(tmp_path, *files, "--accumulate", 1, "--out", tmp_path / "one")
    with serving(trees) as server:
        http = on(f"tar:http://127.0.0.1:{server.server_address[1]}/shards", PLAIN)
        for name, arguments in (("files", files), ("http", http)):
            place = {"GPU_LOGICMIX_INDEX": tmp_path / "index"}
            two = (*arguments, "--batch-size", 4, "--accumulate", 1, "--out", tmp_path / name)
            for command in ranks(tmp_path, 2, *two, **place):
                assert command.process.exitcode == 0, command.text
        assert server.ranges >= 80  # each image of an epoch
    same(weights(tmp_path / "http"), weights(tmp_path / "files"))
    same(weights(tmp_path / "http"), weights(tmp_path / "one"), atol=1e-5)


# --------------------------------------------------------------------------------------------------- network namespaces
def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces():
    """Two machines, 10.213.7.2 and .3, each with a cable to a bridge that is 10.213.7.1 here."""
    try:
        ip("link", "add", "glm-bridge", "type", "bridge")
        ip("addr", "add", "10.213.7.1/24", "dev", "glm-bridge")
        ip("link", "set", "glm-bridge", "up")
        for number, name in enumerate(LINKS, 2):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", "glm-bridge", "up")
            for words in (["addr", "add", f"10.213.7.{number}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                ip("-n", name, *words)
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for words in (*(("netns", "del", name) for name in LINKS), ("link", "del", "glm-bridge")):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*words)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("GPU_LOGICMIX_NETNS") or shutil.which("ip") is None or os.geteuid() != 0,
    reason="changes the machine's network: set GPU_LOGICMIX_NETNS=1 and be root",
)
def test_torchrun_over_two_namespaces(trees, tmp_path):
    """torchrun on two machines that reach the shards, and each other, over a network alone."""
    pytest.importorskip("aiohttp")
    files = (*on(f"csv:{trees / 'files'}", PLAIN), "--accumulate", 1)
    good(tmp_path, *files, "--out", tmp_path / "one")
    with namespaces(), serving(trees, "10.213.7.1") as server:
        data = f"tar:http://10.213.7.1:{server.server_address[1]}/shards"
        arguments = [*on(data, PLAIN), "--batch-size", "4", "--accumulate", "1", "--out", str(tmp_path / "two")]
        started = []
        for rank, name in enumerate(LINKS):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", "10.213.7.2"]
            command += ["--master-port", "29513", "-m", "gpu_logicmix", *arguments]
            place = {"GLOO_SOCKET_IFNAME": "eth0", "GPU_LOGICMIX_INDEX": str(tmp_path / f"index-{rank}")}
            environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            log = open(tmp_path / f"rank-{rank}.txt", "w")  # noqa: SIM115
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            codes = [process.wait(500) for process in started]
        finally:
            for process in started:
                process.kill()
        assert codes == [0, 0], "\n".join((tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1))
        assert server.ranges >= 80
    same(weights(tmp_path / "two"), weights(tmp_path / "one"), atol=1e-5)
