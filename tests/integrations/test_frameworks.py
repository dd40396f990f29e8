"""The mixes in other frameworks: two steps with the real library, in which the model sees what the mix made."""

import collections
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpu_logicmix import GPULogicMix, OrMixup, PartialAsymmetricLoss
from gpu_logicmix.integrations import mix_batch

Named = collections.namedtuple("Named", "image label path")


def samples(count=8, categories=5):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 16, 16, generator=generator)
    return images, torch.randint(-1, 2, (count, categories), generator=generator)


def mixed_by(mix, images, targets, seed):
    torch.manual_seed(seed)
    return mix(images, targets)


class Rows(Dataset):
    """Samples as tuples with a name in them, or as dicts."""

    def __init__(self, keys=None):
        self.images, self.targets = samples()
        self.keys = keys

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        row = self.images[i], self.targets[i], f"{i}.jpg"
        return row if self.keys is None else dict(zip(self.keys, row, strict=True))


# ------------------------------------------------------------------------------------------------------------- batches
@pytest.mark.parametrize("kind", [tuple, list, Named._make, dict])
def test_batches_of_every_kind(kind):
    images, targets = samples()
    parts = [images, targets, ["name"] * 8]
    keys = (0, 1)
    batch = kind(parts) if kind is not dict else dict(zip(("image", "label", "path"), parts, strict=True))
    if kind is dict:
        keys = ("image", "label")
    wanted = mixed_by(GPULogicMix(), images, targets, 3)
    torch.manual_seed(3)
    out = mix_batch(GPULogicMix(), batch, *keys)
    assert type(out) is type(batch)
    assert torch.equal(out[keys[0]], wanted[0])
    assert torch.equal(out[keys[1]], wanted[1])
    assert out["path" if kind is dict else 2] is parts[2]
    assert torch.equal(batch[keys[0]], images)  # as it was
    if kind is dict:
        torch.manual_seed(3)
        assert torch.equal(out["mixed"], GPULogicMix().plan(8).mixed)
        assert "mixed" not in batch


def test_batches_that_are_left_alone_and_wrong_ones():
    images, targets = samples()
    for mix, training in ((GPULogicMix().eval(), True), (GPULogicMix(), False)):
        out = mix_batch(mix, {"x": images, "y": targets}, "x", "y", training=training)
        assert torch.equal(out["x"], images)
        assert not out["mixed"].any()
    with pytest.raises(ValueError, match="images='image', targets='label': the batch has 'x', 'y'"):
        mix_batch(GPULogicMix(), {"x": images, "y": targets}, "image", "label")
    with pytest.raises(ValueError, match="the batch is a tuple of 1"):
        mix_batch(GPULogicMix(), (images,))


# ----------------------------------------------------------------------------------------------------------- Lightning
def lightning_run(callback, keys=None, data_hook=False, **options):
    """Batches that training and validation saw."""
    lightning = pytest.importorskip("lightning")
    seen = {"train": [], "val": []}
    x, y = keys[:2] if keys else (0, 1)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))

        def training_step(self, batch, index):
            seen["train"].append(batch)
            return PartialAsymmetricLoss()(self.net(batch[x]), batch[y])

        def validation_step(self, batch, index):
            seen["val"].append(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Rows(keys), batch_size=8)

        val_dataloader = train_dataloader

    class Hooked(Data):
        def on_after_batch_transfer(self, batch, index):
            return [batch[0] / 2, *batch[1:]]

    module, data = Module(), (Hooked if data_hook else Data)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], num_sanity_val_steps=1, **options,
        )  # fmt: skip
        before = module.net[1].weight.clone()
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2
    assert not torch.equal(before, module.net[1].weight)
    assert "on_after_batch_transfer" not in vars(module)  # all as it was
    assert "on_after_batch_transfer" not in vars(data)
    return seen


@pytest.mark.parametrize("keys", [None, ("pixels", "labels", "path")])
def test_lightning(keys):
    pytest.importorskip("lightning")
    from gpu_logicmix.integrations.lightning import LogicMixCallback

    images, targets = samples()
    where = {"images": keys[0], "targets": keys[1]} if keys else {}
    mix = GPULogicMix(p=1.0, generator=torch.Generator().manual_seed(5))
    seen = lightning_run(LogicMixCallback(mix, **where), keys)
    x, y = keys[:2] if keys else (0, 1)
    again = GPULogicMix(p=1.0, generator=torch.Generator().manual_seed(5))
    for batch in seen["train"]:
        wanted = again(images, targets)
        assert torch.equal(batch[x], wanted[0])
        assert torch.equal(batch[y], wanted[1])
        assert list(batch[keys[2] if keys else 2]) == [f"{i}.jpg" for i in range(8)]
        if keys:
            assert batch["mixed"].all()
    assert len(seen["val"]) == 3
    assert all(torch.equal(batch[x], images) for batch in seen["val"])  # as they are


def test_lightning_with_a_hook_of_the_data_module():
    pytest.importorskip("lightning")
    from gpu_logicmix.integrations.lightning import LogicMixCallback

    images, targets = samples()
    mix = GPULogicMix(p=1.0, generator=torch.Generator().manual_seed(5))
    seen = lightning_run(LogicMixCallback(mix), data_hook=True)
    wanted = GPULogicMix(p=1.0, generator=torch.Generator().manual_seed(5))(images / 2, targets)
    assert torch.equal(seen["train"][0][0], wanted[0])  # after theirs
    assert torch.equal(seen["val"][0][0], images / 2)


def test_lightning_epochs_and_options():
    pytest.importorskip("lightning")
    from gpu_logicmix.integrations.lightning import LogicMixCallback

    images, _ = samples()
    seen = lightning_run(LogicMixCallback(OrMixup()))
    assert [torch.equal(batch[0], images) for batch in seen["train"]] == [False, True]  # on in even epochs
    assert LogicMixCallback(p=0.3, k_max=4).mix.k_max == 4
    with pytest.raises(ValueError, match="mix and p: choose one"):
        LogicMixCallback(GPULogicMix(), p=0.3)


# -------------------------------------------------------------------------------------------------- Hugging Face, timm
def test_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from gpu_logicmix.integrations.huggingface import LogicMixTrainer, partial_bce

    seen = []
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=5)
    model = transformers.ResNetForImageClassification(config)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((module.training, kwargs["pixel_values"])), with_kwargs=True
    )
    images, targets = samples()
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(images, targets, strict=True)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=8, per_device_eval_batch_size=8, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    mix = GPULogicMix(p=1.0)
    trainer = LogicMixTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, mix=mix)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.state.global_step == 2
    assert [training for training, _ in seen] == [True, True, False]
    for _, batch in seen[:2]:  # a mean of others, of no image alone
        assert not any(torch.equal(x, y) for x in batch for y in images)
    assert torch.equal(seen[2][1], images)
    with torch.no_grad():
        assert loss == pytest.approx(partial_bce(model(pixel_values=images).logits, targets).item(), abs=1e-4)
    wanted = [
        nn.functional.binary_cross_entropy_with_logits(logit, label.float())
        for logit, label in zip(model(pixel_values=images).logits.flatten(), targets.flatten(), strict=True)
        if label != -1
    ]
    assert loss == pytest.approx(torch.stack(wanted).mean().item(), abs=1e-4)  # unknown labels are ignored


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    images, targets = samples()
    loader = DataLoader(list(zip(images, targets, strict=True)), batch_size=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    before, mix = model[1].weight.clone(), GPULogicMix(p=1.0)
    for x, y in loader:
        mixed, labels = mix(x, y)
        assert not torch.equal(mixed, x)
        accelerator.backward(PartialAsymmetricLoss()(model(mixed), labels))
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, model[1].weight)


def test_timm_mixup_fn():
    """As train.py of timm uses it, with mixup_off_epoch=1."""
    timm = pytest.importorskip("timm")
    optim = pytest.importorskip("timm.optim")
    from gpu_logicmix.integrations.timm import MixupFn

    images, targets = samples(8)
    images = nn.functional.interpolate(images, 32)
    model = timm.create_model("test_resnet", num_classes=5).train()
    optimizer = optim.create_optimizer_v2(model, opt="sgd", lr=0.1)
    mixup_fn, changed = MixupFn(p=1.0), []
    for epoch in range(2):
        if epoch >= 1:
            mixup_fn.mixup_enabled = False
        input, target = mixup_fn(images, targets)
        changed.append(not torch.equal(input, images))
        loss = PartialAsymmetricLoss()(model(input), target)
        loss.backward()
        optimizer.step()
    assert changed == [True, False]


def test_torchvision_compose():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images, targets = samples()
    images = (images * 255).to(torch.uint8)
    compose = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True), GPULogicMix(p=1.0)])
    torch.manual_seed(1)
    out, labels = compose(images, targets)
    torch.manual_seed(1)
    torch.rand(1)  # the coin of the flip
    wanted = GPULogicMix(p=1.0)(images.flip(-1).float() / 255, targets)
    torch.testing.assert_close(out, wanted[0])
    assert torch.equal(labels, wanted[1])
