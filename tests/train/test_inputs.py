"""step.py: which images and labels a run sees, what a step draws, and predictions of all images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gpu_logicmix import GPULogicMix, OrMixup, hide_labels
from gpu_logicmix.data import DataError, open_dataset
from gpu_logicmix.data.images import digest_of
from gpu_logicmix.errors import RunError
from gpu_logicmix.train import predict
from gpu_logicmix.train.batch import Augment, seed_step
from gpu_logicmix.train.build import make_loss
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.inputs import open_labeled, open_train, open_val
from gpu_logicmix.train.predict import autocast, predict_rows

CPU = World(0, 1, torch.device("cpu"))


def config(**options) -> Config:
    return Config(**{"option": ["count=50"], "size": 32, "known": 0.5, "batch_size": 8, "workers": 0, **options})


# ------------------------------------------------------------------------------------------------------------- the data
def test_labels_that_are_hidden_do_not_depend_on_how_many_images_are_used():
    whole, full = open_train(config())
    assert (full == open_dataset("shapes", "train", 32, count=50).labels).all()
    assert (whole.labels == hide_labels(full, 0.5, 0)).all()
    part, part_full = open_train(config(images=20))
    rows = [int(name.rpartition("-")[2]) for name in part.ids]
    assert len(rows) == 20
    assert (part.labels == whole.labels[rows]).all()
    assert (part_full == full[rows]).all()
    more, _ = open_train(config(images=30))
    assert set(part.ids) < set(more.ids)
    other, _ = open_train(config(images=20, seed=1))
    assert list(other.ids) == list(part.ids)  # the images are the same, the labels are not
    assert (other.labels != part.labels).any()


def test_held_out_images_are_not_trained_on():
    train, _ = open_train(config(holdout=0.3))
    val = open_val(config(holdout=0.3))
    assert (len(train), len(val)) == (35, 15)
    assert not set(train.ids) & set(val.ids)
    assert (val.labels != -1).all()  # validation is on all labels
    assert open_val(config()).split == "val"
    with pytest.raises(DataError, match=r"holdout=0\.01: of 40 images that are 0"):
        open_train(config(option=["count=40"], holdout=0.01))
    with pytest.raises(DataError, match="both parts need some"):
        open_train(config(option=["count=1"], holdout=0.9))


def test_none_of_the_chosen_images_has_a_known_positive():
    with pytest.raises(DataError, match="of the labels of 1 images none is known to be present"):
        open_train(config(images=1, known=0.02))


def test_options_go_to_their_own_format(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match="has no labels"):  # and not: folder has no option count
        open_labeled(config(), f"folder:{tmp_path}", "val")


def test_cache_gives_the_same_run(tmp_path):
    plain, cached = open_train(config())[0], open_train(config(cache=str(tmp_path)))[0]
    assert plain.fingerprint() == cached.fingerprint()
    assert torch.equal(plain[[3, 1]][0], cached[[3, 1]][0])


def test_fingerprint_sees_images_categories_and_labels():
    configs = (config(), config(seed=1), config(images=49), config(known=None))
    prints = {digest_of(open_train(c)[0].fingerprint()) for c in configs}
    assert len(prints) == 4
    assert digest_of(open_train(config())[0].fingerprint()) in prints
    dataset = open_train(config())[0]
    dataset.categories[0] = "disc"
    assert digest_of(dataset.fingerprint()) not in prints


# ------------------------------------------------------------------------------------------------------------ the draw
def test_each_seed_step_and_rank_has_a_stream_of_its_own():
    def drawn(*place):
        seed_step(*place)
        return tuple(torch.rand(4).tolist())

    places = [(seed, step, rank) for seed in range(3) for step in (0, 1, 2, 11) for rank in range(3)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert drawn(1, 11, 0) != drawn(11, 1, 0)
    assert drawn(5, 6, 7) == drawn(5, 6, 7)


def test_augmentation_in_its_order():
    """Flip, RandAugment, then mix; each may be off."""
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    targets = torch.randint(-1, 2, (8, 5), dtype=torch.int8)
    nothing = Augment(config(flip=False, randaugment=False, mix="none"))
    (out,), labels, mixed = nothing(images, targets)
    assert torch.equal(out, images.float() / 255)
    assert torch.equal(labels, targets)
    assert mixed is None
    augment = Augment(config(p=1.0, k_min=2, k_max=2))
    torch.manual_seed(0)
    (out,), labels, mixed = augment(images, targets)
    torch.manual_seed(0)
    one_by_one = augment.randaugment(augment.flip(images)).float() / 255
    one_by_one, ored = augment.mix(one_by_one, targets)
    assert torch.equal(out, one_by_one)
    assert torch.equal(labels, ored)
    assert isinstance(augment.mix, GPULogicMix)
    assert mixed.all()
    assert out.dtype == torch.float32
    assert 0 <= out.min() <= out.max() <= 1


def mixing_epochs(**options) -> list[bool]:
    """Of four: is anything mixed?"""
    augment = Augment(config(epochs=4, flip=False, randaugment=False, **options))
    images, targets = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8), torch.ones(8, 2, dtype=torch.int8)
    on = []
    for epoch in range(4):
        augment.set_epoch(epoch)
        (out,), _, mixed = augment(images, targets)
        on.append(not torch.equal(out, images.float() / 255))
        assert (mixed is not None) == on[-1]
    return on


def test_ormixup_is_off_in_every_other_epoch():
    assert isinstance(Augment(config(mix="ormixup")).mix, OrMixup)
    assert mixing_epochs(mix="ormixup") == [True, False, True, False]
    assert mixing_epochs(mix="ormixup", clean_epochs=2) == [True, False, False, False]


def test_nothing_is_mixed_in_the_clean_epochs():
    assert mixing_epochs(p=1.0) == [True, True, True, True]
    assert mixing_epochs(p=1.0, clean_epochs=1) == [True, True, True, False]
    assert mixing_epochs(p=1.0, clean_epochs=3) == [True, False, False, False]


def test_mixing_can_start_later():
    assert mixing_epochs(p=1.0, mix_start=3) == [False, False, True, True]
    assert mixing_epochs(p=1.0, mix_start=2, clean_epochs=1) == [False, True, True, False]


@pytest.mark.parametrize("name", ["asl", "bce", "focal", "dp-asl"])
def test_losses_take_their_options(name):
    logits, targets = torch.randn(6, 4), torch.tensor([[1, 0, -1, -1]] * 6)
    plain, assume = (make_loss(config(loss=name, loss_option=[f"assume_negative={a}"]), "sum") for a in (False, True))
    assert plain.count(targets) < assume.count(targets)
    assert plain(logits, targets) < assume(logits, targets)
    if name != "bce":
        gamma = "gamma=0" if name == "focal" else "gamma_pos=3"
        other = make_loss(config(loss=name, loss_option=[gamma]), "sum")
        assert plain(logits, targets) != other(logits, targets)


# ---------------------------------------------------------------------------------------------------------- predictions
@pytest.mark.parametrize("batch_size", [7, 50, 64])
def test_predictions_of_all_images_in_order(batch_size):
    dataset = open_labeled(config(), "shapes", "val")
    ticks = []
    out, rows = predict_rows(lambda x: x.mean((2, 3)), dataset, config(batch_size=batch_size), CPU, ticks.append)
    assert rows.tolist() == list(range(50))
    assert sum(ticks) == 50
    expected = torch.stack([dataset[i][0].float().div(255).mean((1, 2)) for i in range(50)])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("count", [1, 8, 37])
@pytest.mark.parametrize("everywhere", [True, False])
def test_processes_put_their_rows_together_a_piece_at_a_time(monkeypatch, count, everywhere):
    """Two processes, one after the other: what the second one gives, the first one adds."""
    monkeypatch.setattr(predict, "PIECE", 24)
    rows, pieces = torch.rand(count, 3), []

    class Second(World):
        def sum_(self, tensor):
            pieces.append(tensor.clone())
            return tensor

    class First(World):
        def sum_(self, tensor):
            return tensor + pieces.pop(0)

    there = predict._gathered(rows[1::2], count, Second(1, 2, torch.device("cpu")), everywhere)
    assert max(piece.numel() for piece in pieces) <= 24
    assert len(there) == (count if everywhere else 0)
    assert torch.equal(predict._gathered(rows[::2], count, First(0, 2, torch.device("cpu")), everywhere), rows)
    assert not pieces


def test_no_image_can_be_read(tmp_path):
    (tmp_path / "a.png").write_bytes(b"broken")
    dataset = open_dataset(f"folder:{tmp_path}", "val", 32, on_bad_image="skip")
    with pytest.raises(DataError, match=r"none of the 1 images can be read\. .*a\.png: cannot be decoded"):
        predict_rows(nn.Identity(), dataset, config(), CPU)


def test_precision():
    assert not autocast(config(), torch.device("cpu"))._enabled
    assert autocast(config(amp="bf16"), torch.device("cpu"))._enabled
    dataset = open_labeled(config(), "shapes", "val")
    out, _ = predict_rows(lambda x: x.mean((2, 3)) @ torch.eye(3), dataset, config(amp="bf16"), CPU)
    assert out.dtype == torch.float32
    assert torch.equal(out, out.bfloat16().float())  # the product was one of bfloat16


@pytest.mark.parametrize("device", ["nonsense", "meta", "cpu:x", "" if torch.cuda.is_available() else "cuda"])
def test_no_such_device(device):
    with pytest.raises(RunError, match="device=") as error, joined_world(device):
        pass
    assert "\n" not in str(error.value)


def test_alone():
    threads = torch.get_num_threads()
    with joined_world("cpu", 1) as world:
        assert world == CPU
        assert torch.get_num_threads() == 1
        assert world.main
        assert world.maximum(7) == 7
        assert torch.equal(world.sum_(torch.ones(2)), torch.ones(2))
    torch.set_num_threads(threads)
    assert np.array_equal(world.maximum(0), 0)


# -------------------------------------------------------------------------------------------------------- sparse labels
def test_a_run_on_sparse_labels_is_the_run_on_a_matrix(tmp_path, monkeypatch):
    """Counts, masks, batches, curriculum, fine-tuning: the same weights, bit for bit."""
    from rich.console import Console
    from safetensors.torch import load_file

    from gpu_logicmix.data.sparse import SparseLabels
    from gpu_logicmix.train import inputs
    from gpu_logicmix.train.loop import fit

    options = {"model": "test_resnet", "weights": "none", "head": "linear", "epochs": 2, "accumulate": 1, "threads": 1}
    settings = config(**options, cft_epochs=3, theta_pos=0.1, theta_neg=-0.1)
    fit(settings, tmp_path / "matrix", console=Console(quiet=True))
    opened = inputs.open_dataset

    def sparse(*arguments, **options):
        dataset = opened(*arguments, **options)
        dataset.labels = SparseLabels.of_dense(dataset.labels)
        return dataset

    monkeypatch.setattr(inputs, "open_dataset", sparse)
    assert isinstance(open_train(settings)[0].labels, SparseLabels)
    fit(settings, tmp_path / "sparse", console=Console(quiet=True))
    for name in ("model", "cft"):
        one, two = (load_file(tmp_path / kind / f"{name}.safetensors") for kind in ("matrix", "sparse"))
        assert all(torch.equal(one[key], two[key]) for key in one)
    monkeypatch.setattr(inputs, "MATRIX_LIMIT", 10)
    with pytest.raises(RunError, match="--no-cl"):
        fit(replace(settings, cl_select="top"), tmp_path / "large", console=Console(quiet=True))
