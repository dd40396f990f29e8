"""GPULogicMix where torchvision's guide puts MixUp and CutMix: after the collate, in a `collate_fn` of one's own.

Better still is the training step (see plain_loop.py): there it runs on the GPU.

    python examples/torchvision_v2.py
"""

import torch
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

from gpu_logicmix import GPULogicMix, hide_labels, open_dataset

torch.manual_seed(0)
dataset = open_dataset("shapes", "train", size=32, count=256)
dataset.labels = hide_labels(dataset.labels, known=0.3)
per_sample = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
mix = GPULogicMix()


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(dataset)

    def __getitem__(self, index):
        image, targets, _ = dataset[index]
        return per_sample(image), targets


def collate_fn(samples):
    return mix(*default_collate(samples))


loader = DataLoader(Augmented(), batch_size=64, shuffle=True, collate_fn=collate_fn)
before = (torch.as_tensor(dataset.labels) == 1).float().sum(1).mean()
after = torch.cat([targets for _, targets in loader]).eq(1).float().sum(1).mean()
print(f"known positive labels a sample: {before:.2f} in the dataset, {after:.2f} in the batches")
