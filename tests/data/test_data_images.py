"""Decoding all sorts of images, the dataset, and the order of batches."""

import io
import os
import struct
import subprocess
import zlib

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from trees import dataset_of, photo

from gpu_logicmix import hide_labels
from gpu_logicmix.data import BadImage, Batches, DataError, ImageDataset, cache_dataset, make_loader, open_dataset
from gpu_logicmix.data.images import read_image, what_changed


def pillow(image, size):
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)).astype(int)


@pytest.mark.parametrize("size", [24, 64, 224])
@pytest.mark.parametrize("shape", [(160, 120), (40, 200), (64, 64), (1, 90), (90, 1), (1, 1)])
def test_resize_is_pillows_bilinear(tmp_path, size, shape):
    image = photo(*shape)
    image.save(tmp_path / "a.png")
    ours = read_image(tmp_path / "a.png", size)
    assert ours.shape == (size, size, 3)
    assert ours.dtype == torch.uint8
    difference = np.abs(ours.numpy().astype(int) - pillow(image, size))
    assert difference.max() <= 2  # rounding in between: torch and Pillow work with differently scaled weights
    assert difference.mean() < 0.25


def test_large_jpegs_are_decoded_small_without_showing_it(tmp_path):
    photo(1600, 1200).save(tmp_path / "a.jpg", quality=92)
    full = pillow(Image.open(tmp_path / "a.jpg"), 64)
    difference = read_image(tmp_path / "a.jpg", 64).numpy().astype(int) - full
    assert np.abs(difference).mean() < 1.0
    assert abs(difference.mean()) < 0.5


def test_grey_cmyk_palette_alpha_and_16_bits(tmp_path):
    image = photo()
    for mode, name in (("L", "g.jpg"), ("CMYK", "c.jpg"), ("P", "p.png"), ("1", "b.png"), ("LA", "la.png")):
        image.convert(mode).save(tmp_path / name)
        with Image.open(tmp_path / name) as stored:
            expected = pillow(stored, 160) if mode != "LA" else pillow(image.convert("L"), 160)
        difference = np.abs(read_image(tmp_path / name, 160).numpy().astype(int) - expected)
        assert difference.max() <= 1, mode
    wide = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert np.array_equal(read_image(tmp_path / "wide.png", 64).numpy()[..., 1], wide >> 8)


def test_transparent_parts_are_white(tmp_path):
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)
    pixels[:, :, 0], pixels[:, 4:, 3] = 255, 255  # red, left half fully transparent
    Image.fromarray(pixels).save(tmp_path / "a.png")
    out = read_image(tmp_path / "a.png", 8)
    assert out[0, 0].tolist() == [255, 255, 255]
    assert out[0, 7].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation):
    upright = photo(64, 64)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what a camera that was held so has stored
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "a.png", 64).numpy(), np.asarray(upright))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_cost_the_image(tmp_path):
    photo().save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05garbage")
    assert read_image(tmp_path / "a.jpg", 32).shape == (32, 32, 3)


def bomb(width, height):
    """A PNG that claims to be huge."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def broken_files():
    jpeg = io.BytesIO()
    photo().save(jpeg, "JPEG")
    return {
        "truncated.jpg": (jpeg.getvalue()[:-900], "truncated"),
        "text.jpg": (b"this is no image", "not an image, or of none of the formats JPEG, PNG"),
        "empty.jpg": (b"", "not an image"),
        "postscript.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "not an image"),
        "bomb.png": (bomb(50_000, 50_000), "make it smaller"),
        "large.png": (bomb(10_000, 10_000), "10000 x 10000 pixels are over the limit"),
    }


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", list(broken_files()))
def test_broken_images_are_named(tmp_path, name):
    data, match = broken_files()[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadImage, match=match) as caught:
        read_image(tmp_path / name, 32)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(BadImage, match=r"a.jpg: no such file; replace"):
        read_image(tmp_path / "a.jpg", 32)
    with pytest.raises(BadImage, match=r"cannot be read \(not a plain file\)"):
        read_image(tmp_path, 32)
    os.mkfifo(tmp_path / "pipe.jpg")  # must not be waited for
    with pytest.raises(BadImage, match=r"pipe.jpg: cannot be read \(not a plain file\)"):
        read_image(tmp_path / "pipe.jpg", 32)
    photo().save(tmp_path / "b.png")
    os.symlink(tmp_path / "b.png", tmp_path / "link.png")
    assert read_image(tmp_path / "link.png", 32).shape == (32, 32, 3)
    with pytest.raises(BadImage, match="symbolic link"):
        read_image(tmp_path / "link.png", 32, follow=False)


def test_no_program_is_ever_started(tmp_path, monkeypatch):
    """An EPS file by the name of .jpg: Pillow would start Ghostscript."""
    eps = io.BytesIO()
    photo().save(eps, "EPS")
    (tmp_path / "a.jpg").write_bytes(eps.getvalue())
    with Image.open(tmp_path / "a.jpg") as image:
        assert image.format == "EPS"  # Pillow alone would
    for name in ("Popen", "run", "check_call", "check_output"):
        monkeypatch.setattr(subprocess, name, lambda *a, **k: pytest.fail("started a program"))
    with pytest.raises(BadImage, match="not an image"):
        read_image(tmp_path / "a.jpg", 32)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "MPO"])
def test_formats_that_are_read(tmp_path, name):
    photo().save(tmp_path / "a", name)
    assert read_image(tmp_path / "a", 32).shape == (32, 32, 3)


# --- The dataset ------------------------------------------------------------------------------------------------------


def test_samples_and_batches_agree(tmp_path):
    dataset = dataset_of(tmp_path)
    image, targets, index = dataset[3]
    assert (image.dtype, image.shape, targets.dtype, index) == (torch.uint8, (3, 16, 16), torch.int8, 3)
    images, many, rows = dataset[[7, 3, 3]]
    assert torch.equal(images[1], image)
    assert torch.equal(many[2], targets)
    assert rows.tolist() == [7, 3, 3]
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(dataset[-1][0], dataset[9][0])
    targets[:] = 7  # what a user does to a sample stays out of the matrix
    many[:] = 7
    assert dataset.labels.max() == 1
    for wrong in (10, -11, [0, 10], [-1], torch.tensor(10)):
        with pytest.raises(IndexError, match="out of range"):
            dataset[wrong]
    assert dataset[[]][0].shape == (0, 3, 16, 16)
    plain = torch.utils.data.DataLoader(dataset, batch_size=4)  # works, only slower
    assert next(iter(plain))[0].shape == (4, 3, 16, 16)
    assert "10 images of 16 x 16" in repr(dataset)


def test_masks_slices_and_scalars_are_what_they_are_in_numpy(tmp_path):
    dataset = dataset_of(tmp_path)
    rows = np.arange(10)
    mask = rows % 3 == 1
    for index in (mask, mask.tolist(), torch.from_numpy(mask), slice(2, 8, 3), slice(None), slice(-2, None), range(3)):
        expected = rows[index if isinstance(index, slice) else np.asarray(index)]
        images, targets, found = dataset[index]
        assert found.tolist() == expected.tolist()
        assert torch.equal(images, dataset[expected.tolist()][0])
        assert np.array_equal(targets.numpy(), dataset.labels[expected])
    for scalar in (torch.tensor(3), np.int64(3), np.array(3), torch.tensor(-7)):
        assert dataset[scalar][2] == 3
        assert dataset[scalar][0].shape == (3, 16, 16)
    for wrong in (mask[:5], [True, False], 1.5, [0.5, 1.0], "3", None, [[1, 2]], torch.tensor([1.0])):
        with pytest.raises(IndexError):
            dataset[wrong]


def test_fingerprint_says_what_changed(tmp_path):
    dataset = dataset_of(tmp_path)
    before = dataset.fingerprint()
    assert before == same_files(dataset).fingerprint()
    changed = lambda other: what_changed(before, other.fingerprint())  # noqa: E731
    os.utime(tmp_path / "3.png", ns=(5, 5))
    assert changed(dataset) == ["file dates"]
    (tmp_path / "4.png").unlink()
    assert changed(dataset) == ["file sizes", "file dates"]
    dataset = dataset_of(tmp_path)
    before = dataset.fingerprint()
    labels = dataset.labels.copy()
    labels[0, 0] = 1 if labels[0, 0] != 1 else 0
    other = same_files(dataset)
    other.labels = labels
    assert changed(other) == ["labels"]
    assert set(changed(dataset.take(range(9)))) == {"images", "labels", "files", "file sizes", "file dates"}
    assert dataset.take([3, 5]).fingerprint() == dataset.take([5, 3]).take([1, 0]).fingerprint()
    cached = cache_dataset(dataset, tmp_path / "cache")
    assert changed(cached) == []  # the same with and without a cache
    assert cached.take([1]).fingerprint() == dataset.take([1]).fingerprint()


def same_files(dataset):
    return ImageDataset("test", "train", dataset.source, dataset.labels, dataset.categories, dataset.ids)


def test_labels_can_be_hidden_saved_and_compared(tmp_path):
    dataset = dataset_of(tmp_path)
    full = np.abs(dataset.labels)
    dataset.labels = full
    dataset.labels = hide_labels(dataset.labels, 0.4, seed=1)
    np.save(tmp_path / "labels.npy", dataset.labels)
    other = dataset_of(tmp_path)
    other.labels = np.load(tmp_path / "labels.npy")
    assert np.array_equal(other.labels, hide_labels(full, 0.4, seed=1))
    assert np.array_equal(other[[1, 2]][1].numpy(), other.labels[[1, 2]])
    with pytest.raises(DataError, match="do not fit"):
        dataset.labels = full[:5]
    with pytest.raises(DataError, match="must be 1"):
        dataset.labels = full + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_stop_or_are_skipped_counted_and_listed(tmp_path, workers):
    with pytest.raises(BadImage, match=r"4.png: cannot be decoded"):
        dataset_of(tmp_path, bad=(4, 8))[list(range(10))]
    dataset = dataset_of(tmp_path, bad=(4, 8), on_bad_image="skip")
    for _ in range(2):
        loader = make_loader(dataset, 3, workers=workers)
        batches = list(loader)
        assert [len(images) for images, _, _ in batches] == [3, 2, 2, 1]
        index = torch.cat([rows for _, _, rows in batches])
        assert index.tolist() == [0, 1, 2, 3, 5, 6, 7, 9]
        assert torch.equal(torch.cat([t for _, t, _ in batches]), torch.from_numpy(dataset.labels)[index])
    lines = dataset.bad_images()
    assert len(lines) == 2
    assert "4.png" in lines[0]
    assert "8.png" in lines[1]
    with pytest.raises(BadImage):
        dataset[4]


def test_a_worker_that_meets_a_bad_image_names_it(tmp_path):
    dataset = dataset_of(tmp_path, bad=(4,))
    with pytest.raises(BadImage, match=r"4\.png"):
        list(make_loader(dataset, 5, workers=1))


@pytest.mark.slow
def test_dataset_goes_to_spawned_processes(tmp_path):
    dataset = dataset_of(tmp_path)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=Batches(10, 5), num_workers=1, multiprocessing_context="spawn"
    )
    assert [len(images) for images, _, _ in loader] == [5, 5]


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    length=st.integers(0, 60),
    size=st.integers(1, 9),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(-3, 5),
    epoch=st.integers(0, 3),
)
def test_batches(length, size, world, shuffle, drop_last, seed, epoch):
    def batches(batch_size, rank=0, world=1, start=0):
        sampler = Batches(length, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world=world)
        sampler.set_epoch(epoch, start)
        found = list(sampler)
        assert len(found) == max(len(sampler) - start, 0)
        assert (sampler.epoch, sampler.start) == (epoch + 1, 0)
        return found

    alone = batches(size * world)
    flat = [i for batch in alone for i in batch]
    if drop_last:
        assert len(flat) == length // (size * world) * size * world
        assert len(set(flat)) == len(flat)
    else:
        assert sorted(flat) == list(range(length))
    if not shuffle:
        assert flat == list(range(len(flat)))
    shares = [batches(size, rank, world) for rank in range(world)]
    for number, batch in enumerate(alone):
        together = [i for share in shares for i in share[number]]
        assert sorted(together) == sorted(batch)
        assert all(len(share[number]) <= size for share in shares)
    assert batches(size * world, start=1) == alone[1:]


def test_epochs_differ_and_repeat():
    sampler = Batches(50, 8, shuffle=True, seed=4)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(Batches(50, 8, shuffle=True, seed=5)) not in (first, second)
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "rank": 2, "world": 2}):
        with pytest.raises(ValueError, match="must be"):
            Batches(50, **wrong)


def test_loader_over_epochs_with_workers():
    dataset = open_dataset("shapes", size=16, count=40)
    loader = make_loader(dataset, 8, shuffle=True, workers=1, drop_last=True)
    first, second = ([rows.tolist() for _, _, rows in loader] for _ in range(2))
    assert first != second
    assert sorted(row for batch in first for row in batch) == list(range(40))
    loader.sampler.set_epoch(0, start=2)
    assert [rows.tolist() for _, _, rows in loader] == first[2:]
