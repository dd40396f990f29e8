"""Small pictures and datasets on disk, for tests of whatever reads them."""

import numpy as np
from PIL import Image

from gpu_logicmix.data.dataset import ImageDataset
from gpu_logicmix.data.images import FileSource


def picture(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 12), colour).save(path)


def photo(width=160, height=120, seed=0):
    """Smooth colours with a little noise, as a camera gives."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height), 2)
    noise = rng.integers(-6, 7, (height, width, 3))
    return Image.fromarray((np.asarray(coarse).astype(int) + noise).clip(0, 255).astype(np.uint8))


def csv_tree(root, text, name="data.csv"):
    root.mkdir(exist_ok=True)
    for i in "abc":
        picture(root / "img" / f"{i}.png")
    (root / name).write_text(text)
    return root / name


def dataset_of(root, count=10, bad=(), size=16, on_bad_image="raise", categories=3):
    paths = [f"{i}.png" for i in range(count)]
    for i, path in enumerate(paths):
        photo(20, 16, seed=i).save(root / path)
    for i in bad:
        (root / paths[i]).write_bytes(b"broken")
    labels = np.random.default_rng(0).integers(-1, 2, (count, categories)).astype(np.int8)
    names = [f"c{c}" for c in range(categories)]
    return ImageDataset("test", "train", FileSource(root, paths, size), labels, names, paths, on_bad_image)
