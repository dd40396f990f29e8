"""LogicMix in Lightning: a callback; the LightningModule knows nothing of it.

pip install lightning
python examples/lightning_callback.py
"""

import logging

import lightning
import torch
from torch import nn

from gpu_logicmix import PartialAsymmetricLoss, hide_labels, make_loader, open_dataset
from gpu_logicmix.integrations.lightning import LogicMixCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning.seed_everything(0, verbose=False)
dataset = open_dataset("shapes", "train", size=32, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)
loader = make_loader(dataset, batch_size=64, shuffle=True)  # batches are (images, targets, index)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, len(dataset.categories)),
        )  # fmt: skip
        self.loss = PartialAsymmetricLoss()
        self.losses = []

    def training_step(self, batch, batch_index):
        images, targets, _ = batch
        loss = self.loss(self.net(images.float() / 255), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


module = Classifier()
trainer = lightning.Trainer(
    max_epochs=6, accelerator="auto", devices=1, callbacks=[LogicMixCallback(p=0.5, k_max=3)],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, loader)
print(f"loss {sum(module.losses[:4]) / 4:.3f} -> {sum(module.losses[-4:]) / 4:.3f}")
