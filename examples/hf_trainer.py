"""LogicMix in the Hugging Face Trainer, with a model of transformers.

pip install transformers accelerate
python examples/hf_trainer.py
"""

import tempfile

from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments, set_seed

from gpu_logicmix import GPULogicMix, PartialAsymmetricLoss, hide_labels, open_dataset
from gpu_logicmix.integrations.huggingface import LogicMixTrainer

set_seed(0)
shapes = open_dataset("shapes", "train", size=32, count=128)
shapes.labels = hide_labels(shapes.labels, known=0.3)
images, targets, _ = shapes[range(128)]
dataset = [{"pixel_values": x.float() / 255, "labels": y} for x, y in zip(images, targets, strict=True)]

model = ResNetForImageClassification(
    ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=len(shapes.categories))
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=5, per_device_train_batch_size=32, learning_rate=3e-3, logging_steps=4,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = LogicMixTrainer(
        model, arguments, train_dataset=dataset, mix=GPULogicMix(p=0.5), partial_loss=PartialAsymmetricLoss()
    )
    trainer.train()

losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
