"""Fixtures for the tests of the mixes."""

import pytest

import gpu_logicmix.augment.apply


@pytest.fixture(params=["host", "device"])
def way(request, monkeypatch):
    """Both ways of reading a group: its members alone, as on the CPU, or all places, as on a GPU or when compiled."""
    if request.param == "device":
        monkeypatch.setattr(gpu_logicmix.augment.apply, "_sizes_are_at_hand", lambda rows: False)
