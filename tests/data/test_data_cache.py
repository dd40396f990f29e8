"""The cache: the same pixels, and never a part of it taken for the whole."""

import gc
import json
import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import launch
import numpy as np
import pytest
import torch
from trees import dataset_of, photo

from gpu_logicmix.data import BadImage, Batches, DataError, cache, cache_build, cache_dataset, make_loader, open_dataset
from gpu_logicmix.data.cache import list_caches, prune, verify_cache


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def only(directory):
    """The one cache in a folder."""
    (folder,) = directory.iterdir()
    return folder


def same(cached, dataset):
    rows = np.random.default_rng(0).permutation(len(dataset))
    for ours, theirs in zip(cached[rows], dataset[rows], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(cached[3][0], dataset[3][0])


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 16 * 16 * 3, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_cache_is_the_dataset(tmp_path, images, monkeypatch, chunk_bytes, threads):
    monkeypatch.setattr(cache_build, "CHUNK_BYTES", chunk_bytes)
    dataset = dataset_of(images)
    cached = cache_dataset(dataset, tmp_path / "cache", threads=threads)
    same(cached, dataset)
    folder = only(tmp_path / "cache")
    assert sorted(p.name for p in folder.iterdir()) == ["crc32.u4", "images.u8", "lock", "manifest.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["count"], manifest["size"], manifest["source"]) == (10, 16, str(images))
    verify_cache(folder)
    monkeypatch.setattr(cache, "build_cache", lambda *a: pytest.fail("built again"))
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
    (only(tmp_path / "cache") / "images.u8").unlink()
    assert [rows.tolist() for _, _, rows in loader]  # what is open stays open
    gone = make_loader(cache_copy(cached), 3)
    with pytest.raises(DataError, match=r"images.u8: cannot be read"):
        list(gone)


def cache_copy(cached):
    """As another process gets it: not yet mapped."""
    cached.source = pickle.loads(pickle.dumps(cached.source))
    return cached


def test_changed_sources_get_a_cache_of_their_own(tmp_path, images):
    directory = tmp_path / "cache"
    before = cache_dataset(dataset_of(images), directory)
    assert not before.warnings
    os.utime(images / "3.png", ns=(1, 1))
    after = cache_dataset(_same_files(images), directory)
    assert after.source.folder != before.source.folder
    assert "a new cache is built" in after.warnings[0]
    assert "--prune" in after.warnings[0]
    nine = cache_dataset(_same_files(images, 9), directory)  # other datasets share the folder
    assert len(nine) == 9
    assert len(list(directory.iterdir())) == 3
    same(cache_dataset(_same_files(images), directory, rebuild=True), _same_files(images))


def test_damage_is_named(tmp_path, images):
    directory = tmp_path / "cache"
    cached = cache_dataset(dataset_of(images), directory)
    file = cached.source.file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"images.u8: 7,679 bytes, must be 7,680; remove the folder"):
        cache_dataset(_same_files(images), directory)
    for place in (0, 4 * 768 + 5, len(whole) - 1):
        row = place // 768
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=f"image {row} is damaged"):
            verify_cache(file.parent)
        again = cache_dataset(_same_files(images), directory)
        with pytest.raises(DataError, match=f"image {row} is damaged"):  # on first use
            again[list(range(10))]
        good = [i for i in range(10) if i != row]
        assert torch.equal(again[good][0], cached[good][0])
    file.write_bytes(whole)
    (file.parent / "crc32.u4").write_bytes(b"")
    with pytest.raises(DataError, match=r"crc32.u4: missing or damaged"):
        cache_dataset(_same_files(images), directory)
    with pytest.raises(DataError, match="no manifest"):
        verify_cache(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "{",
        "[]",
        "[" * 100_000,
        {"crc32": []},
        {"crc32": 5},
        {"crc32": None},
        {"count": "10"},
        {"count": -1},
        {"count": 9},
        {"count": True},
        {"size": 0},
        {"size": [16]},
        {"bad": []},
        {"bad": {"x": "y"}},
        {"bad": {"99": "y"}},
        {"fingerprint": 1},
        {"version": 99},
    ],
)
def test_manifests_of_wrong_types_are_one_line(tmp_path, images, change):
    directory = tmp_path / "cache"
    cached = cache_dataset(dataset_of(images), directory)
    file = cached.source.folder / "manifest.json"
    file.write_text(change if isinstance(change, str) else json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataError, match=r"remove the folder .*, or build it again") as caught:
        cache_dataset(_same_files(images), directory)
    assert "\n" not in str(caught.value)
    same(cache_dataset(_same_files(images), directory, rebuild=True), _same_files(images))


def test_a_cut_file_is_an_error_not_a_crash(tmp_path, images):
    cached = cache_dataset(dataset_of(images), tmp_path / "cache")
    with open(cached.source.file, "r+b") as file:
        file.truncate(5 * 768 + 10)
    cached[[0, 1, 2]]
    with pytest.raises(DataError, match="cut short at image 5"):
        cached[[5]]


def test_a_reader_keeps_the_pixels_it_started_with(tmp_path, images):
    dataset = dataset_of(images)
    cached = cache_dataset(dataset, tmp_path / "cache")
    before = cached[[1, 2]][0].clone()
    times = (images / "1.png").stat()
    photo(20, 16, seed=99).save(images / "1.png")  # other pixels under the old date and size: the same fingerprint
    data = (images / "1.png").read_bytes()
    (images / "1.png").write_bytes(data[: times.st_size].ljust(times.st_size, b"\0"))
    os.utime(images / "1.png", ns=(times.st_atime_ns, times.st_mtime_ns))
    other = _same_files(images)
    other.on_bad_image = "skip"
    rebuilt = cache_dataset(other, tmp_path / "cache", rebuild=True)
    assert rebuilt.source.folder == cached.source.folder
    assert torch.equal(cached[[1, 2]][0], before)
    with pytest.raises(DataError, match="built again while it was in use"):
        cache_copy(cached)[[1]]


def test_list_and_prune(tmp_path, images):
    directory = tmp_path / "cache"
    with pytest.raises(DataError, match="no such folder"):
        list_caches(directory)
    old = cache_dataset(dataset_of(images), directory)
    os.utime(images / "3.png", ns=(1, 1))
    new = cache_dataset(_same_files(images), directory)
    other = cache_dataset(_same_files(images, 9), directory)
    folders = {name: source.source.folder for name, source in (("old", old), ("new", new), ("other", other))}
    os.utime(folders["old"], (1, 1))
    os.utime(folders["other"], (2, 2))
    half, damaged, mine = (
        directory / f"csv-train-8-{'ab' * 6}",
        directory / f"csv-val-8-{'0' * 12}",
        directory / "notes",
    )
    for folder in (half, damaged, mine):
        folder.mkdir()
    for name in ("manifest.json", "progress.jsonl", "lock"):  # of another program
        (mine / name).write_text("{}")
    (half / ".images.u8.0123.tmp").write_bytes(b"x")
    (damaged / "mine.txt").write_text("do not remove")
    (half / "images.u8.part").write_bytes(b"x")
    (damaged / "manifest.json").write_text("{")
    (mine / "read.txt").write_text("not a cache")
    os.symlink(tmp_path, directory / "link")
    infos = {info.folder: info for info in list_caches(directory)}
    assert set(infos) == {*folders.values(), half, damaged}
    assert (infos[half].state, infos[damaged].state) == ("unfinished", "damaged")
    info = infos[folders["new"]]
    assert (info.state, info.count, info.size, info.in_use, info.outdated) == ("finished", 10, 16, True, False)
    assert info.bytes >= 7680
    assert infos[folders["old"]].outdated
    assert {i.folder for i in prune(directory)} == {half, damaged}  # all others are in use
    assert not half.exists()
    assert [p.name for p in damaged.iterdir()] == ["mine.txt"]
    assert len(list(mine.iterdir())) == 4
    del old, new, other
    gc.collect()
    assert {i.folder for i in prune(directory)} == {folders["old"]}
    assert {i.folder for i in prune(directory, days=1)} == {folders["other"]}
    os.utime(folders["new"], (1, 1))
    assert {i.folder for i in prune(directory, days=1)} == {folders["new"]}
    assert mine.is_dir()
    assert (tmp_path / "images").is_dir()


def test_planted_links_in_a_cache_are_not_followed(tmp_path, images):
    dataset = dataset_of(images)
    folder = cache_dataset(dataset, tmp_path / "cache").source.folder
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("images.u8.part", "progress.jsonl", "crc32.u4", "bad.txt", "manifest.json.tmp"):
        (folder / name).unlink(missing_ok=True)
        os.symlink(mine, folder / name)
    same(cache_dataset(dataset, tmp_path / "cache", rebuild=True), dataset)
    assert mine.read_text() == "mine"
    (folder / "lock").unlink()
    os.symlink(mine, folder / "lock")
    with pytest.raises(OSError, match="symbolic link"):
        cache_dataset(dataset, tmp_path / "cache", rebuild=True)
    assert mine.read_text() == "mine"


def test_a_damaged_part_is_decoded_again(tmp_path, images, monkeypatch):
    monkeypatch.setattr(cache_build, "CHUNK_BYTES", 2 * 768)
    dataset = dataset_of(images, bad=(9,))
    with pytest.raises(BadImage):
        cache_dataset(dataset, tmp_path / "cache")
    part = only(tmp_path / "cache") / "images.u8.part"
    data = bytearray(part.read_bytes())
    data[4 * 768 + 3] ^= 255
    part.write_bytes(data)
    read, reads = dataset.source.read, []
    dataset.on_bad_image = "skip"
    dataset.source.read = lambda index: reads.append(index) or read(index)
    cached = cache_dataset(dataset, tmp_path / "cache", threads=1)
    assert reads == [4, 5]
    assert torch.equal(cached[[4]][0], dataset[[4]][0])


def _same_files(images, count=10):
    """The dataset again, without writing the files anew."""
    from gpu_logicmix.data.dataset import ImageDataset
    from gpu_logicmix.data.images import FileSource

    paths = [f"{i}.png" for i in range(count)]
    source = FileSource(images, paths, 16)
    return ImageDataset("test", "train", source, np.zeros((count, 3), dtype=np.int8), ["a", "b", "c"], paths)


def test_another_format_version_is_not_read(tmp_path, images, monkeypatch):
    first = cache_dataset(dataset_of(images), tmp_path / "cache")
    monkeypatch.setattr(cache, "VERSION", 99)
    assert cache_dataset(_same_files(images), tmp_path / "cache").source.folder != first.source.folder


def test_disk_is_checked_first(tmp_path, images, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(DataError, match=r"needs 0.0 MB for 10 images at 16 x 16, but only 0.0 MB are free"):
        cache_dataset(dataset_of(images), tmp_path / "cache")
    assert not (only(tmp_path / "cache") / "images.u8.part").exists()
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
    bad = (only(tmp_path / "cache") / "bad.txt").read_text().splitlines()
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


def build_slowly(folder: Path, report: Path) -> None:
    """In a process of its own."""
    cache_build.CHUNK_BYTES, cache_build.COMMIT_SECONDS = 3 * 16 * 16 * 5, 0.0
    dataset = open_dataset("shapes", size=16, count=400)
    read, reads = dataset.source.read, []

    def slow(index):
        reads.append(index)
        time.sleep(0.002)
        return read(index)

    dataset.source.read = slow
    cache_dataset(dataset, folder, threads=2)
    report.write_text(str(len(reads)))


def builder(folder: Path, report: Path):
    launch.serve()
    process = launch.CONTEXT.Process(target=build_slowly, args=(folder, report))
    process.start()
    return process


def test_killed_builds_go_on(tmp_path):
    """SIGKILL at several moments: no cache until it is whole, and finished work is not done again."""
    place, report = tmp_path / "caches", tmp_path / "report"
    place.mkdir()
    for lines in (3, 20, 40):
        process = builder(place, report)
        while process.is_alive() and not list(place.iterdir()):
            time.sleep(0.002)
        folder = only(place)
        log = folder / "progress.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.is_alive():
            if log.exists() and log.read_bytes().count(b"\n") > lines:
                break
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (folder / "manifest.json").exists()
        assert not (folder / "images.u8").exists()
    with open(log, "ab") as file:
        file.write(b'{"number": 70, "crc')  # killed in the middle of a line
    finished = log.read_bytes().count(b"\n") - 1
    process = builder(place, report)
    process.join()
    assert process.exitcode == 0
    assert int(report.read_text()) == 400 - 5 * finished
    verify_cache(folder)
    dataset = open_dataset("shapes", size=16, count=400)
    same(cache_dataset(dataset, place), dataset)


@pytest.mark.parametrize(
    "entry", ['{"number": 0, "crc32": [1], "bad": {}}', "[]", '{"number": "x"}', "5", "null", "{}"]
)
def test_half_a_cache_of_another_source_or_of_nonsense_is_not_continued(tmp_path, images, entry, monkeypatch):
    dataset = dataset_of(images, bad=(0,))
    with pytest.raises(BadImage):
        cache_dataset(dataset, tmp_path / "cache")
    folder = only(tmp_path / "cache")
    photo(20, 16).save(images / "0.png")
    header = json.loads((folder / "progress.jsonl").read_text().splitlines()[0])
    for change in ({}, {"fingerprint": "x"}):
        for name in ("manifest.json", "images.u8"):
            (folder / name).unlink(missing_ok=True)
        (folder / "images.u8.part").write_bytes(bytes(10 * 16 * 16 * 3))
        (folder / "progress.jsonl").write_text(json.dumps({**header, **change}) + f"\n{entry}\n")
        monkeypatch.setattr(type(dataset.source), "parts", lambda *a: {"files": "same"})
        monkeypatch.setattr(cache, "digest_of", lambda parts: header["fingerprint"])
        same(cache_dataset(dataset, tmp_path / "cache"), dataset)


def test_two_builders_at_once(tmp_path):
    place = tmp_path / "caches"
    builders = [builder(place, tmp_path / f"report-{i}") for i in range(2)]
    for process in builders:
        process.join()
    decoded = sorted(int((tmp_path / f"report-{i}").read_text()) for i in range(2))
    assert decoded == [0, 400]  # one built, the other waited and found it
    verify_cache(only(place))
