"""GPULogicMix in a plain PyTorch loop: one line more.

python examples/plain_loop.py
"""

import torch
from torch import nn

from gpu_logicmix import GPULogicMix, hide_labels, make_loader, open_dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

dataset = open_dataset("shapes", "train", size=32, count=512)
dataset.labels = hide_labels(dataset.labels, known=0.3)  # 70 % of the labels become -1, unknown
loader = make_loader(dataset, batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(dataset.categories)),
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
mix = GPULogicMix(p=0.5, k_min=2, k_max=3)  # <- once

losses = []
for _epoch in range(5):
    for images, targets, _ in loader:
        images, targets = images.to(device).float() / 255, targets.to(device)
        images, targets = mix(images, targets)  # <- the line
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(images), targets.clamp(min=0).float(), reduction="none"
        )
        loss = loss[targets != -1].mean()  # unknown labels say nothing
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

print(f"loss {sum(losses[:8]) / 8:.3f} -> {sum(losses[-8:]) / 8:.3f}")
