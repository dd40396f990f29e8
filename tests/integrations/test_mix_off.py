"""Where a framework does not mix, the images are still normalised and cast: the model sees one range, always."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpu_logicmix import GPULogicMix, OrMixup
from gpu_logicmix.integrations import mix_batch
from gpu_logicmix.integrations.batches import finish_batch

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
PIXELS = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(-1, 2, (8, 5), generator=torch.Generator().manual_seed(1))


def wanted():
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (PIXELS / 255 - mean) / std


def assert_finished(images):
    torch.testing.assert_close(images, wanted(), rtol=1e-5, atol=1e-5)


def normalising(kind=GPULogicMix, **options):
    return kind(normalize=(MEAN, STD), **options)


def odd_epoch():
    mix = normalising(OrMixup)
    mix.set_epoch(1)
    return mix


# ------------------------------------------------------------------------------------------------------------- batches
@pytest.mark.parametrize(
    ("mix", "training"), [(normalising(), False), (normalising().eval(), True), (odd_epoch(), True)]
)
def test_mix_batch_finishes_what_it_does_not_mix(mix, training):
    batch = {"x": PIXELS, "y": LABELS}
    out = mix_batch(mix, batch, "x", "y", training=training)
    assert_finished(out["x"])
    assert out["y"] is LABELS
    assert not out["mixed"].any()
    assert batch["x"] is PIXELS
    cast = mix_batch(GPULogicMix(out_dtype=torch.bfloat16), (PIXELS / 255, LABELS), training=False)
    assert torch.equal(cast[0], (PIXELS / 255).bfloat16())
    assert mix_batch(normalising(), (PIXELS[:0], LABELS[:0]))[0].dtype == torch.float32


def test_finish_batch_needs_no_labels():
    mix = normalising()
    assert_finished(finish_batch(mix, PIXELS))
    assert_finished(finish_batch(mix, [PIXELS])[0])
    out = finish_batch(mix, {"x": PIXELS, "path": ["a"]}, "x")
    assert_finished(out["x"])
    assert set(out) == {"x", "path"}
    anything = object()
    assert finish_batch(GPULogicMix(), anything) is anything  # nothing to do: not even looked at
    with pytest.raises(ValueError, match="images='image': the batch has 'x', 'path'"):
        finish_batch(mix, out, "image")
    with pytest.raises(ValueError, match="images=1: the batch is a tuple of 1"):
        finish_batch(mix, (PIXELS,), 1)


def test_timm_mixup_fn_that_is_switched_off():
    from gpu_logicmix.integrations.timm import MixupFn

    mixup_fn = MixupFn(normalising())
    mixup_fn.mixup_enabled = False
    images, labels = mixup_fn(PIXELS, LABELS)
    assert_finished(images)
    assert labels is LABELS


# ----------------------------------------------------------------------------------------------------------- Lightning
def lightning_module(seen, example=None):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))
            self.example_input_array = example

        def forward(self, images):
            seen.append(("example", images))
            return self.net(images)

        def training_step(self, batch, index):
            seen.append(("train", batch[0]))
            return self.net(batch[0]).sum()

        def validation_step(self, batch, index):
            seen.append(("val", batch[0]))

        def test_step(self, batch, index):
            seen.append(("test", batch[0]))

        def predict_step(self, batch, index):
            seen.append(("predict", batch if isinstance(batch, torch.Tensor) else batch[0]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def lightning_trainer(mix, **options):
    lightning = pytest.importorskip("lightning")
    from gpu_logicmix.integrations.lightning import LogicMixCallback

    warnings.simplefilter("ignore")
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[LogicMixCallback(mix)], **{"enable_model_summary": False, "max_epochs": 2} | options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mix", [normalising(p=0.0), normalising(OrMixup)])
def test_lightning_finishes_every_stage(mix):
    seen: list = []
    module, trainer = lightning_module(seen), lightning_trainer(mix)
    pairs = DataLoader(list(zip(PIXELS, LABELS, strict=True)), batch_size=8)
    trainer.fit(module, pairs, pairs)
    trainer.validate(module, pairs, verbose=False)
    trainer.test(module, pairs, verbose=False)
    for images in (PIXELS, torch.utils.data.TensorDataset(PIXELS)):  # alone, and as [images]
        trainer.predict(module, DataLoader(images, batch_size=8))
    stages = [stage for stage, _ in seen]
    assert {stage: stages.count(stage) for stage in stages} == {"val": 4, "train": 2, "test": 1, "predict": 2}
    mixed = [i for i, (stage, _) in enumerate(seen) if stage == "train"][: isinstance(mix, OrMixup)]  # epoch 0
    for i, (_, images) in enumerate(seen):
        if i in mixed:
            assert not torch.equal(images, wanted())
        else:
            assert_finished(images)
    assert "on_after_batch_transfer" not in vars(module)


@pytest.mark.filterwarnings("ignore")
def test_lightning_leaves_batches_alone_that_there_is_nothing_to_do_with():
    seen: list = []
    module, trainer = lightning_module(seen), lightning_trainer(GPULogicMix())
    trainer.predict(module, DataLoader(PIXELS, batch_size=8))
    assert torch.equal(seen[0][1], PIXELS)


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_an_example_for_its_summary():
    """It goes through the hook of the batches, in training, and is no batch."""
    seen: list = []
    module = lightning_module(seen, example=PIXELS)
    trainer = lightning_trainer(normalising(), enable_model_summary=True, max_epochs=1)
    trainer.fit(module, DataLoader(list(zip(PIXELS, LABELS, strict=True)), batch_size=8))
    assert [stage for stage, _ in seen] == ["example", "train"]
    assert_finished(seen[0][1])


# -------------------------------------------------------------------------------------------------------- Hugging Face
def vit(seed=0):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16,
            patch_size=8, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def hf_trainer(tmp_path, model, rows, mix, arguments=None, **options):
    from transformers import TrainingArguments

    from gpu_logicmix.integrations.huggingface import LogicMixTrainer

    settings = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 1, "logging_steps": 1,
        "learning_rate": 0.0, "max_grad_norm": 1e9, "use_cpu": True, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(str(tmp_path), **settings | (arguments or {}))
    return LogicMixTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, mix=mix, **options)


def test_hugging_face_accumulates_the_mean_of_the_steps(tmp_path):
    """Trainer leaves a loss as it is where the model's own knows how many steps there are: ViT's, not ours."""
    labels = torch.tensor([1, 0, -1, -1, 0]).repeat(8, 1)  # as many known in every step, so the mean is the same
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(PIXELS / 255, labels, strict=True)]
    logs = []
    for steps in (1, 4):
        settings = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
        trainer = hf_trainer(tmp_path, vit(), rows, GPULogicMix(p=0.0), settings)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for name in ("loss", "grad_norm"):
        assert float(logs[0][name]) > 0.1
        assert float(logs[1][name]) == pytest.approx(float(logs[0][name]), rel=1e-4)


def test_hugging_face_refuses_losses_that_it_would_ignore(tmp_path):
    with pytest.raises(ValueError, match=r"compute_loss_func=.*as partial_loss"):
        hf_trainer(tmp_path, vit(), [], None, compute_loss_func=lambda *_, **__: 0)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*as partial_loss"):
        hf_trainer(tmp_path, vit(), [], None, {"label_smoothing_factor": 0.1})


@pytest.mark.parametrize("labelled", [True, False])
def test_hugging_face_finishes_what_it_evaluates_and_predicts(tmp_path, labelled):
    model, seen = vit(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["pixel_values"]), with_kwargs=True)
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(PIXELS, LABELS, strict=True)]
    trainer = hf_trainer(tmp_path, model, rows, normalising(OrMixup))
    rows = rows if labelled else [{"pixel_values": row["pixel_values"]} for row in rows]
    logits = trainer.predict(rows).predictions
    assert logits.shape == (8, 5)
    if labelled:
        trainer.evaluate()
    for images in seen:
        assert_finished(images)
    assert len(seen) == 1 + labelled
