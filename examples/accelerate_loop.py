"""GPULogicMix in a loop with Accelerate: after `prepare`, on the batch that Accelerate has moved to the device.

python examples/accelerate_loop.py                    # or: accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from gpu_logicmix import GPULogicMix, PartialAsymmetricLoss, hide_labels, open_dataset

accelerator = Accelerator()
set_seed(0, device_specific=True)  # each process draws its own mixes
dataset = open_dataset("shapes", "train", size=32, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)
loader = DataLoader(dataset, batch_size=32, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(dataset.categories)),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
mix, loss_fn = GPULogicMix(), PartialAsymmetricLoss()  # <- once
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _epoch in range(10):
    for images, targets, _ in loader:
        images, targets = mix(images.float() / 255, targets)  # <- the line
        loss = loss_fn(model(images), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())

accelerator.print(f"loss {sum(losses[:8]) / 8:.3f} -> {sum(losses[-8:]) / 8:.3f}")
