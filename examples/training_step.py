"""GPULogicMix in a class with a `training_step`, as Lightning has it, and in a loop as Accelerate has it.

Neither package is needed: this is the shape of the code. The mix is a submodule, so `train()` and `eval()` switch it on
and off together with the model, and its bank (if any) moves to the device and into checkpoints with everything else.

    python examples/training_step.py
"""

import torch
from torch import nn

from gpu_logicmix import GPULogicMix, PartialAsymmetricLoss, hide_labels, make_loader, open_dataset


class Classifier(nn.Module):  # LightningModule
    def __init__(self, categories: int):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(64, categories)
        self.mix = GPULogicMix(bank=64)  # partners from earlier batches too: here batches are small
        self.loss = PartialAsymmetricLoss()

    def forward(self, images):
        return self.head(self.backbone(images))

    def training_step(self, batch, batch_index):
        images, targets, _ = batch
        images, targets = self.mix(images, targets)
        return self.loss(self(images), targets)

    def validation_step(self, batch, batch_index):
        images, targets, _ = batch
        images, targets = self.mix(images, targets)  # does nothing: the module is in eval()
        return self.loss(self(images), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
dataset = open_dataset("shapes", "train", size=32, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)
loader = make_loader(dataset, batch_size=8, shuffle=True)

module = Classifier(len(dataset.categories)).to(device)  # accelerator.prepare(module, optimizer, loader)
optimizer = module.configure_optimizers()
for epoch in range(3):
    losses = []
    module.train()
    for batch_index, (images, targets, index) in enumerate(loader):
        batch = images.to(device).float() / 255, targets.to(device), index
        loss = module.training_step(batch, batch_index)
        optimizer.zero_grad()
        loss.backward()  # accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    with torch.no_grad():
        validation = module.validation_step(batch, 0).item()
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, validation {validation:.3f}")

print(f"samples in the bank: {min(int(module.mix.bank_seen), module.mix.bank)}, in the checkpoint: ", end="")
print(", ".join(name for name in module.state_dict() if name.startswith("mix.")))
