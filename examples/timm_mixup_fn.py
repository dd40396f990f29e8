"""GPULogicMix in the place of timm's `mixup_fn`, with timm's model, loss place and optimizer around it.

timm's train.py calls `input, target = mixup_fn(input, target)` on the device. `MixupFn` has the same call; it wants a
label matrix where timm's Mixup wants class numbers.

    python examples/timm_mixup_fn.py
"""

import timm
import timm.optim
import torch

from gpu_logicmix import PartialAsymmetricLoss, hide_labels, make_loader, open_dataset
from gpu_logicmix.integrations.timm import MixupFn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
dataset = open_dataset("shapes", "train", size=32, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)
loader = make_loader(dataset, batch_size=64, shuffle=True)

model = timm.create_model("resnet10t", num_classes=len(dataset.categories)).to(device)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
train_loss_fn = PartialAsymmetricLoss()
mixup_fn = MixupFn(p=0.5)  # timm sets mixup_fn.mixup_enabled = False from --mixup-off-epoch on

losses = []
for _epoch in range(5):
    model.train()
    for input, target, _ in loader:
        input, target = input.to(device).float() / 255, target.to(device)
        if mixup_fn is not None:
            input, target = mixup_fn(input, target)
        output = model(input)
        loss = train_loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

print(f"loss {sum(losses[:4]) / 4:.3f} -> {sum(losses[-4:]) / 4:.3f}")
