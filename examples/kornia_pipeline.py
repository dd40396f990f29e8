"""LogicMix as the last of Kornia's augmentations, in one AugmentationSequential: all on the batch, on the device.

Kornia keeps the parameters of each call; `params=` replays them.

    python examples/kornia_pipeline.py
"""

import kornia.augmentation as K
import torch

from gpu_logicmix import KorniaLogicMix, hide_labels, make_loader, open_dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
dataset = open_dataset("shapes", "train", size=64, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)

augment = K.AugmentationSequential(
    K.RandomHorizontalFlip(),  # each sample on its own
    K.ColorJitter(0.2, 0.2, 0.2),
    KorniaLogicMix(p=0.5),  # then samples with each other, and their labels
    data_keys=["input", "class"],
).to(device)

mixed = total = 0
for images, targets, _ in make_loader(dataset, batch_size=64, shuffle=True):
    images, targets = images.to(device).float() / 255, targets.to(device)
    augmented, labels = augment(images, targets)
    again, _ = augment(images, targets, params=augment._params)
    assert torch.equal(augmented, again)
    mixed, total = mixed + int((augment._params[2].data["batch_prob"] > 0).sum()), total + len(images)

print(f"{mixed} of {total} samples were mixed")
