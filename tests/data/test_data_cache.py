"""The cache: the same pixels, and never a part of it taken for the whole."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from trees import dataset_of

from gpu_logicmix.data import BadImage, Batches, DataError, cache, cache_dataset, make_loader, open_dataset
from gpu_logicmix.data.cache import verify_cache


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def same(cached, dataset):
    rows = np.random.default_rng(0).permutation(len(dataset))
    for ours, theirs in zip(cached[rows], dataset[rows], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(cached[3][0], dataset[3][0])


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 16 * 16 * 3, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_cache_is_the_dataset(tmp_path, images, monkeypatch, chunk_bytes, threads):
    monkeypatch.setattr(cache, "CHUNK_BYTES", chunk_bytes)
    dataset = dataset_of(images)
    cached = cache_dataset(dataset, tmp_path / "cache", threads=threads)
    same(cached, dataset)
    folder = tmp_path / "cache" / "test-train-16"
    assert sorted(p.name for p in folder.iterdir()) == ["images.u8", "lock", "manifest.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["count"], manifest["size"], manifest["source"]) == (10, 16, str(images))
    verify_cache(folder)
    monkeypatch.setattr(cache, "_build", lambda *a: pytest.fail("built again"))
    again = cache_dataset(dataset, tmp_path / "cache")
    same(again, dataset)
    again.labels = np.zeros_like(dataset.labels)  # labels are not in the cache
    assert not again[[1, 2]][1].any()


def test_cache_with_workers_and_pickle(tmp_path, images):
    dataset = dataset_of(images)
    cached = cache_dataset(dataset, tmp_path / "cache")
    cached[[0]]
    assert len(pickle.dumps(cached.source)) < 2000  # the file, not its contents
    for loader in (
        make_loader(cached, 4, shuffle=True, workers=2),  # a thread, whatever the workers
        torch.utils.data.DataLoader(cached, batch_size=None, sampler=Batches(10, 4), num_workers=1),
    ):
        batches = list(loader)
        rows = torch.cat([rows for _, _, rows in batches])
        assert torch.equal(torch.cat([i for i, _, _ in batches]), dataset[rows.tolist()][0])


def test_reading_ahead(tmp_path, images):
    cached = cache_dataset(dataset_of(images), tmp_path / "cache")
    loader = make_loader(cached, 3, shuffle=True, seed=1)
    first, second = ([rows.tolist() for _, _, rows in loader] for _ in range(2))
    assert first == list(Batches(10, 3, shuffle=True, seed=1))
    assert first != second
    for _ in loader:  # left early: nothing hangs, and the next pass is whole
        break
    loader.sampler.set_epoch(0, start=1)
    assert [rows.tolist() for _, _, rows in loader] == first[1:]
    assert len(loader) == 4
    (tmp_path / "cache" / "test-train-16" / "images.u8").unlink()
    gone = make_loader(cache_copy(cached), 3)
    with pytest.raises(FileNotFoundError):
        list(gone)


def cache_copy(cached):
    """As another process gets it: not yet mapped."""
    cached.source = pickle.loads(pickle.dumps(cached.source))
    return cached


def test_changed_sources_are_noticed(tmp_path, images):
    cache_dataset(dataset_of(images), tmp_path / "cache")
    os.utime(images / "3.png", ns=(1, 1))
    with pytest.raises(DataError, match=r"out of date.*--rebuild \(rebuild=True\)"):
        cache_dataset(_same_files(images), tmp_path / "cache")
    same(cache_dataset(_same_files(images), tmp_path / "cache", rebuild=True), _same_files(images))
    with pytest.raises(DataError, match="of a dataset of 10 images, not 9"):
        cache_dataset(_same_files(images, 9), tmp_path / "cache")
    file = tmp_path / "cache" / "test-train-16" / "images.u8"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="missing or not of"):
        cache_dataset(_same_files(images), tmp_path / "cache")
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged from image 0 on"):
        verify_cache(file.parent)
    (file.parent / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest.json: cannot be read"):
        cache_dataset(_same_files(images), tmp_path / "cache")
    with pytest.raises(DataError, match="no manifest"):
        verify_cache(tmp_path)


def _same_files(images, count=10):
    """The dataset again, without writing the files anew."""
    from gpu_logicmix.data.images import FileSource, ImageDataset

    paths = [f"{i}.png" for i in range(count)]
    source = FileSource(images, paths, 16)
    return ImageDataset("test", "train", source, np.zeros((count, 3), dtype=np.int8), ["a", "b", "c"], paths)


def test_another_format_version_is_not_read(tmp_path, images, monkeypatch):
    cache_dataset(dataset_of(images), tmp_path / "cache")
    monkeypatch.setattr(cache, "VERSION", 99)
    with pytest.raises(DataError, match="another version"):
        cache_dataset(_same_files(images), tmp_path / "cache")


def test_disk_is_checked_first(tmp_path, images, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(DataError, match=r"needs 0.0 MB for 10 images at 16 x 16, but only 0.0 MB are free"):
        cache_dataset(dataset_of(images), tmp_path / "cache")
    assert not (tmp_path / "cache" / "test-train-16" / "images.u8.part").exists()
    dataset = dataset_of(images)
    count = 82_783
    dataset._labels, dataset.source.size, dataset.size = np.zeros((count, 80), dtype=np.int8), 448, 448
    dataset.source.paths = ["x"] * count
    with pytest.raises(DataError, match=r"needs 49.8 GB for 82,783 images at 448"):
        cache_dataset(dataset, tmp_path / "cache")


def test_bad_images_in_a_cache(tmp_path, images):
    dataset = dataset_of(images, bad=(2, 7))
    with pytest.raises(BadImage, match=r"2.png: cannot be decoded.*\(2 such images, listed in .*bad.txt\)"):
        cache_dataset(dataset, tmp_path / "cache")
    bad = (tmp_path / "cache" / "test-train-16" / "bad.txt").read_text().splitlines()
    assert len(bad) == 2
    dataset.on_bad_image = "skip"
    dataset.source.read = lambda index: pytest.fail("the first build has decoded everything")
    cached = cache_dataset(dataset, tmp_path / "cache")
    assert cached[list(range(10))][2].tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert cached.bad_images() == bad
    with pytest.raises(BadImage, match=r"2.png"):
        cached[2]
    dataset.on_bad_image = "raise"
    with pytest.raises(BadImage, match=r"2.png"):
        cache_dataset(dataset, tmp_path / "cache")


BUILD = """
import sys, time
from gpu_logicmix.data import cache, cache_dataset, open_dataset
cache.CHUNK_BYTES, cache.COMMIT_SECONDS = 3 * 16 * 16 * 5, 0.0
dataset = open_dataset("shapes", size=16, count=400)
read = dataset.source.read
reads = 0
def slow(index):
    global reads
    reads += 1
    time.sleep(0.002)
    return read(index)
dataset.source.read = slow
cache_dataset(dataset, sys.argv[1], threads=2)
print("decoded", reads)
"""


def test_killed_builds_go_on(tmp_path):
    """SIGKILL at several moments: no cache until it is whole, and finished work is not done again."""
    folder = tmp_path / "shapes-train-16"
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    for lines in (3, 20, 40):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        log = folder / "progress.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if log.exists() and log.read_bytes().count(b"\n") > lines:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (folder / "manifest.json").exists()
        assert not (folder / "images.u8").exists()
    with open(log, "ab") as file:
        file.write(b'{"number": 70, "crc')  # killed in the middle of a line
    finished = log.read_bytes().count(b"\n") - 1
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(out.split("decoded")[1]) == 400 - 5 * finished
    verify_cache(folder)
    dataset = open_dataset("shapes", size=16, count=400)
    same(cache_dataset(dataset, tmp_path), dataset)


def test_half_a_cache_of_another_source_is_not_continued(tmp_path, images, monkeypatch):
    folder = tmp_path / "cache" / "test-train-16"
    folder.mkdir(parents=True)
    (folder / "images.u8.part").write_bytes(bytes(10 * 16 * 16 * 3))
    header = {"version": 1, "source": "elsewhere", "size": 16, "count": 10, "fingerprint": "x", "chunk": 256}
    (folder / "progress.jsonl").write_text(json.dumps(header) + '\n{"number": 0, "crc32": 1, "bad": {}}\n')
    dataset = dataset_of(images)
    same(cache_dataset(dataset, tmp_path / "cache"), dataset)


def test_two_builders_at_once(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    decoded = sorted(int(b.communicate()[0].split("decoded")[1]) for b in builders)
    assert decoded == [0, 400]  # one built, the other waited and found it
    verify_cache(tmp_path / "shapes-train-16")
