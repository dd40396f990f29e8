"""Kornia's AugmentationSequential, then GPULogicMix: both on the batch, both on the device.

python examples/kornia_pipeline.py
"""

import kornia.augmentation as K
import torch

from gpu_logicmix import GPULogicMix, hide_labels, make_loader, open_dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
dataset = open_dataset("shapes", "train", size=64, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)

augment = K.AugmentationSequential(K.RandomHorizontalFlip(), K.ColorJitter(0.2, 0.2, 0.2), data_keys=["input"])
mix = GPULogicMix(p=0.5)

mixed = total = 0
for images, targets, _ in make_loader(dataset, batch_size=64, shuffle=True):
    images, targets = images.to(device).float() / 255, targets.to(device)
    images = augment(images)  # each sample on its own
    plan = mix.plan(len(images), device)  # drawn apart only to count; mix(images, targets) draws by itself
    images, targets = mix(images, targets, plan)  # then samples with each other
    mixed, total = mixed + int(plan.mixed.sum()), total + len(images)

print(f"{mixed} of {total} samples were mixed")
