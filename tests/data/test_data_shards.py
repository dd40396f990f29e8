"""Shards: the same images and labels as the files they were packed from, on disk and over a network."""

import copy
import io
import json
import os
import pickle
import resource
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run as command
from PIL import Image
from served import serving
from trees import dataset_of, photo

from gpu_logicmix.data import BadImage, DataError, make_loader, open_dataset, pack, pack_dataset, remote, shards
from gpu_logicmix.data.index import load_index, save_index
from gpu_logicmix.data.sparse import SparseLabels


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path / "index"))


@pytest.fixture
def packed(tmp_path):
    """A dataset in files, and the folder of its shards."""
    (tmp_path / "files").mkdir()
    dataset = dataset_of(tmp_path / "files", count=11)
    pack_dataset(dataset, tmp_path / "shards", per_shard=4)
    return dataset, tmp_path / "shards"


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as httpd:
        yield httpd


def same(ours, theirs):
    assert ours.ids == list(theirs.ids)
    assert ours.categories == theirs.categories
    labels = ours.labels.dense() if isinstance(ours.labels, SparseLabels) else ours.labels
    assert np.array_equal(labels, theirs.labels)
    rows = [3, 0, 10, 7, 7]
    for a, b in zip(ours[rows], theirs[rows], strict=True):
        assert torch.equal(a, b)


def test_a_path_will_do_for_the_name(packed):
    dataset, home = packed
    same(open_dataset(Path(f"tar:{home}"), "train", 16), dataset)


def test_shards_are_the_files(packed):
    dataset, home = packed
    assert sorted(p.name for p in home.glob("*.tar")) == [f"train-0000{i}.tar" for i in range(3)]
    found = open_dataset(f"tar:{home}", "train", 16)
    same(found, dataset)
    for workers in (0, 1):
        ours, theirs = (make_loader(d, 4, shuffle=True, seed=3, workers=workers) for d in (found, dataset))
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    same(pickle.loads(pickle.dumps(found)), dataset)
    fingerprints = found.fingerprint(), dataset.fingerprint()
    for part in ("categories", "images", "labels"):
        assert fingerprints[0][part] == fingerprints[1][part]
    assert open_dataset(f"tar:{home}", "train", 16).fingerprint() == fingerprints[0]
    with tarfile.open(home / "train-00000.tar") as shard:  # WebDataset's form
        assert shard.getnames()[:3] == ["00000000.png", "00000000.json", "00000001.png"]


def test_packing_goes_on_and_gives_the_same_bytes(packed, tmp_path, monkeypatch):
    dataset, home = packed
    whole = {p.name: p.read_bytes() for p in home.glob("*.tar")}
    (home / "train-00001.tar").unlink()
    (home / "train.json").unlink()
    written = []
    write = pack._write_shard
    monkeypatch.setattr(pack, "_write_shard", lambda d, path, *a: written.append(path.name) or write(d, path, *a))
    pack_dataset(dataset, home, per_shard=4)
    assert written == ["train-00001.tar"]
    assert {p.name: p.read_bytes() for p in home.glob("*.tar")} == whole


def test_shards_of_anything_else_are_left_alone(packed, tmp_path):
    """Whoever wrote them: they may be the only copy, or those that are packed right now."""
    dataset, home = packed
    before = {p.name: p.read_bytes() for p in home.iterdir()}
    inside = open_dataset(f"tar:{home}", "train", 16)
    same_again = copy.copy(dataset)
    same_again.labels = np.zeros_like(dataset.labels)
    for other, options in ((same_again, {}), (dataset, {"resize": 8}), (inside, {})):
        with pytest.raises(DataError, match=r"train.json: shards of 'train' are there already.*choose another folder"):
            pack_dataset(other, home, per_shard=4, **options)
        assert {p.name: p.read_bytes() for p in home.iterdir()} == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "train-00007.tar").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"train-00007.tar: shards of 'train' are there already"):
        pack_dataset(dataset, foreign)
    assert (foreign / "train-00007.tar").read_bytes() == b"mine"


def test_images_whose_names_end_in_anything(tmp_path):
    root, rows = tmp_path / "files", ["image,cat"]
    root.mkdir()
    kinds = {
        "a.png": "PNG",
        "b.jfif": "JPEG",
        "c": "PNG",
        "d.mpo": "MPO",
        "e.dat": "PPM",
        "f.jpg": "BMP",
        "g.x": "WEBP",
    }
    for n, (name, kind) in enumerate(kinds.items()):
        Image.new("RGB", (8, 8), (30 * n, 0, 0)).save(root / name, kind)
        rows.append(f"{name},1")
    (root / "labels.csv").write_text("\n".join(rows))
    dataset = open_dataset(f"csv:{root / 'labels.csv'}", "train", 8)
    pack_dataset(dataset, tmp_path / "shards")
    found = open_dataset(f"tar:{tmp_path / 'shards'}", "train", 8)
    assert list(found.ids) == list(dataset.ids)
    assert torch.equal(found[range(7)][0], dataset[range(7)][0])
    with tarfile.open(tmp_path / "lost.tar", "w") as shard:
        shard.add(root / "labels.csv", "1.jxl")
        (root / "1.json").write_text('{"labels": ["cat"]}')
        shard.add(root / "1.json", "1.json")
    with pytest.raises(DataError, match=r"lost.tar: 1.json has no image beside it \(looked for .bmp"):
        shards._read_shard(str(tmp_path / "lost.tar"))


def test_resized_drawn_and_bad_images(tmp_path):
    (tmp_path / "files").mkdir()
    dataset = dataset_of(tmp_path / "files", bad=(2,))
    with pytest.raises(BadImage, match=r"2\.png"):
        pack_dataset(dataset, tmp_path / "a")
    dataset.on_bad_image = "skip"
    pack_dataset(dataset, tmp_path / "a", resize=8)
    found = open_dataset(f"tar:{tmp_path / 'a'}", "train", 8)
    assert len(found) == 9
    assert "2.png" not in found.ids
    small = dataset_of(tmp_path / "files", size=8)
    difference = found[[0]][0].float() - small[[0]][0].float()
    assert difference.abs().mean() < 8  # JPEG
    shapes = open_dataset("shapes", size=16, count=5)
    pack_dataset(shapes, tmp_path / "b")
    assert torch.equal(open_dataset(f"tar:{tmp_path / 'b'}", "train", 16)[[4, 1]][0], shapes[[4, 1]][0])


def test_over_http(packed, server, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "WAIT", 0.01)
    dataset, _ = packed
    spec = f"tar:http://127.0.0.1:{server.server_address[1]}/shards"
    found = open_dataset(spec, "train", 16)
    same(found, dataset)
    before = server.ranges
    found[[1, 2]]
    assert server.ranges == before + 2  # an image is one range
    server.failures = 3  # a lost connection is tried again
    same(found, dataset)
    server.failures = 10**9
    with pytest.raises(DataError, match=r"train-00000.tar: cannot be read, tried 5 times.*; try again later"):
        found[[1]]
    server.failures = 0
    with pytest.raises(DataError, match=r"none/train.json: no such file"):
        open_dataset(spec.replace("shards", "none"), "train", 16)
    monkeypatch.setattr(shards, "_read_shard", lambda path: pytest.fail("indexed again"))
    same(open_dataset(spec, "train", 16), dataset)


def test_a_server_without_ranges_is_named_at_once(packed, server, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: pytest.fail("tried again"))
    found = open_dataset(f"tar:http://127.0.0.1:{server.server_address[1]}/shards", "train", 16)
    monkeypatch.setattr(server.RequestHandlerClass, "answer", whole_file)
    with pytest.raises(DataError, match=r"train-00000.tar: the server does not answer range requests; use one"):
        found[[1]]

    def in_pieces():
        raise ValueError("The HTTP server doesn't appear to support range requests. Only reading ...")

    with pytest.raises(DataError, match=r"x.tar: the server does not answer range requests"):
        remote.tried("x.tar", in_pieces)


def whole_file(self, body):
    """What http.server of Python and others answer, whatever range is asked for."""
    data = (self.server.home / self.path.lstrip("/")).read_bytes()
    self.send_response(200)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    if body:
        self.wfile.write(data)


def write_shard(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


def jpeg(seed=0):
    out = io.BytesIO()
    photo(20, 16, seed).save(out, "JPEG")
    return out.getvalue()


def test_shards_of_others(tmp_path):
    """Without a list of shards, with names of categories, in either form."""
    notes = [{"labels": ["dog", "cat"]}, {"present": ["cow"], "absent": ["cat"]}, {"present": [], "unknown": ["cat"]}]
    members = [
        (f"./{i}.{end}", c)
        for i, n in enumerate(notes)
        for end, c in (("jpg", jpeg(i)), ("json", json.dumps(n).encode()))
    ]
    write_shard(tmp_path / "s" / "train" / "x.tar", [*members, ("readme.txt", b"hello")])
    dataset = open_dataset(f"tar:{tmp_path / 's'}", "train", 16)
    assert dataset.categories == ["cat", "cow", "dog"]
    assert dataset.labels.tolist() == [[1, 0, 1], [0, 1, -1], [-1, 0, 0]]
    assert open_dataset(f"tar:{tmp_path / 's'}", "train", 16, others="unknown").labels[0].tolist() == [1, -1, 1]
    assert dataset[[0, 2]][0].shape == (2, 3, 16, 16)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("a.jpg", b"x")], "image 'a' has no a.json"),
        ([("a.jpg", b"x"), ("a.json", b"{")], "a.json: invalid JSON"),
        ([("a.jpg", b"x"), ("a.json", b"[" * 100_000)], "a.json: invalid JSON"),
        ([("a.jpg", b"x"), ("a.json", b"[]")], "must have 'labels'"),
        ([("a.jpg", b"x"), ("a.json", b'{"labels": "cat"}')], "'labels' must be a list"),
        ([("a.jpg", b"x"), ("a.json", b'{"labels": [true]}')], "'labels' must be a list"),
        ([("a.jpg", b"x"), ("a.png", b"x"), ("a.json", b'{"labels": []}')], "two images are called 'a'"),
        ([("a.jpg", b"x"), ("a.json", b'{"labels": [5]}')], "names no category at all"),
        ([("a.txt", b"x")], "no images in the shards"),
    ],
)
def test_bad_shards_are_one_line(tmp_path, members, match):
    write_shard(tmp_path / "s" / "train-0.tar", members)
    with pytest.raises(DataError, match=match) as caught:
        open_dataset(f"tar:{tmp_path / 's'}", "train", 16)
    assert "\n" not in str(caught.value)


def test_changed_and_damaged_shards(packed):
    _, home = packed
    found = open_dataset(f"tar:{home}", "train", 16)
    file = home / "train-00001.tar"
    place = int(found.source.places[5, 1])
    data = bytearray(file.read_bytes())
    data[place + 3] ^= 1
    with open(file, "r+b") as out:  # in place, under the reader
        out.write(data)
    with pytest.raises(BadImage, match="not the image that was there when the index was made"):
        found[[5]]
    file.unlink()
    with pytest.raises(DataError, match=r"train-00001.tar: no such file, but it is in the list of shards"):
        open_dataset(f"tar:{home}", "train", 16)
    for text in (
        "{",
        "[]",
        '{"shards": 5}',
        '{"shards": ["../x.tar"], "categories": []}',
        '{"shards": [], "categories": []}',
    ):
        (home / "train.json").write_text(text)
        with pytest.raises(DataError, match=r"train.json: must be"):
            open_dataset(f"tar:{home}", "train", 16)
    with pytest.raises(DataError, match=r"no val.json, val-\*.tar"):
        open_dataset(f"tar:{home}", "val", 16)


def test_indices_are_parsed_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """Python 3.11 cannot parse in several threads at once, which np.load does with the head of a file."""
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path))
    save_index("key", {"sizes": np.arange(12)}, {})
    load, inside, most = np.load, [], []

    def watched(*arguments, **options):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.01)
        array = load(*arguments, **options)
        inside.pop()
        return array

    monkeypatch.setattr(np, "load", watched)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(load_index, ["key"] * 8))
    assert len(most) == 8
    assert max(most) == 1
    assert all(arrays["sizes"].tolist() == list(range(12)) for arrays, _ in found)


def test_more_shards_than_a_process_may_have_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "HELD", 3)
    for k in range(40):
        note = json.dumps({"labels": ["cat"]}).encode()
        write_shard(tmp_path / "s" / f"train-{k:02d}.tar", [(f"{k}.jpg", jpeg(k)), (f"{k}.json", note)])
    dataset = open_dataset(f"tar:{tmp_path / 's'}", "train", 16, on_bad_image="skip")
    limits, there = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 20, limits[1]))
    try:
        _, _, index = dataset[list(range(40))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(index) == 40, dataset.bad_images()


def test_samples_in_folders_whose_names_have_a_dot(tmp_path):
    """The name of a sample ends at the first dot after its folder, as in WebDataset."""
    note = json.dumps({"present": ["cat"]}).encode()
    members = [(f"v1.0/{i}.{end}", c) for i in range(2) for end, c in (("jpg", jpeg(i)), ("json", note))]
    write_shard(tmp_path / "s" / "train-0.tar", members)
    dataset = open_dataset(f"tar:{tmp_path / 's'}", "train", 16, labels="sparse")
    assert dataset.ids == ["v1.0/0", "v1.0/1"]


def test_samples_that_name_only_what_is_present_need_no_matrix(tmp_path):
    """All else is unknown."""
    members = [
        ("a.jpg", jpeg()),
        ("a.json", b'{"present": ["cat"]}'),
        ("b.jpg", jpeg(1)),
        ("b.json", b'{"present": []}'),
    ]
    write_shard(tmp_path / "s" / "train-0.tar", members)
    listing = shards.list_tar(str(tmp_path / "s"), "train")
    assert isinstance(listing.labels, SparseLabels)
    assert listing.labels.dense().tolist() == [[1], [-1]]


def test_images_out_of_shards_are_resized_once(tmp_path):
    """And not made 448 x 448 first."""
    checks = (np.indices((600, 600)).sum(0) % 2 * 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(np.stack([checks] * 3, 2)).save(out, "PNG")
    write_shard(tmp_path / "s" / "train-0.tar", [("a.png", out.getvalue()), ("a.json", b'{"labels": ["cat"]}')])
    code, output = command("pack", f"tar:{tmp_path / 's'}", "--out", tmp_path / "p", "--size", 600)
    assert code == 0, output
    image = open_dataset(f"tar:{tmp_path / 'p'}", "train", 600)[0][0].float()
    assert (image[0] - torch.from_numpy(checks).float()).abs().mean() < 8  # JPEG
