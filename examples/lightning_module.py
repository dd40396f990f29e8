"""GPULogicMix in a LightningModule: a submodule, called in `training_step`.

As a submodule it follows `train()` and `eval()`: validation is never mixed. Batches are small here, so partners also
come from a bank of earlier samples.

    python examples/lightning_module.py
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpu_logicmix import GPULogicMix, PartialAsymmetricLoss, hide_labels, open_dataset


class Classifier(L.LightningModule):
    def __init__(self, categories: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, categories),
        )  # fmt: skip
        self.mix = GPULogicMix(p=0.5, bank=64)  # <- once
        self.loss = PartialAsymmetricLoss()
        self.losses = []

    def training_step(self, batch, batch_index):
        images, targets, _ = batch
        images, targets = self.mix(images.float() / 255, targets)  # <- the line
        loss = self.loss(self.net(images), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_index):
        images, targets, _ = batch
        self.log("val_loss", self.loss(self.net(images.float() / 255), targets), batch_size=len(images))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


L.seed_everything(0, verbose=False)
dataset = open_dataset("shapes", "train", size=32, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)
module = Classifier(len(dataset.categories))
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(max_epochs=6, **options)
trainer.fit(module, DataLoader(dataset, batch_size=16, shuffle=True), DataLoader(dataset, batch_size=64))

losses = module.losses
print(f"loss {sum(losses[:8]) / 8:.3f} -> {sum(losses[-8:]) / 8:.3f}")
