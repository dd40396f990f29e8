"""Fixtures for the tests of the mixes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import resize as reference_resize

import gpu_logicmix.augment.apply


@pytest.fixture(params=["host", "device"])
def way(request, monkeypatch):
    """Both ways of reading a group: its members alone, as on the CPU, or all places, as on a GPU or when compiled."""
    if request.param == "device":
        monkeypatch.setattr(gpu_logicmix.augment.apply, "_sizes_are_at_hand", lambda rows: False)


@pytest.fixture(scope="module")
def photos(shared):
    """Four photos, in one size that is neither square nor even."""
    paths = sorted((shared / "data" / "coco-mini" / "train2014").glob("*.jpg"))[:4]
    assert len(paths) == 4
    photos = [torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1) for path in paths]
    return torch.stack([reference_resize(photo, [225, 200]) for photo in photos])
