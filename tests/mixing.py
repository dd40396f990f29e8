"""What the tests of the mixes share: oracles in plain Python, made-up batches."""

import math

import torch
from scipy import stats

from gpu_logicmix import GPULogicMix, Mixup, MixupPME, MultiLabelMixup, OrMixup

NAN = float("nan")
MIXES = [GPULogicMix, Mixup, OrMixup, MultiLabelMixup, MixupPME]
ALL = [*MIXES, lambda: GPULogicMix(bank=16)]
NAMES = [mix.__name__ for mix in MIXES] + ["GPULogicMix-bank"]
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.uint8: 0.5}


def is_unknown(label, unknown):
    return math.isnan(label) if math.isnan(unknown) else label == unknown


def or_oracle(labels, unknown):
    if any(label == 1 for label in labels):
        return 1
    if all(label == 0 for label in labels):
        return 0
    return unknown


def logicmix_oracle(images, targets, plan, unknown=-1):
    """One sample after the other, one category after the other."""
    new_images, new_targets = [], []
    for group, size in zip(plan.index.tolist(), plan.size.tolist(), strict=True):
        members = group[:size]
        new_images.append(sum(images[m].double() for m in members) / size)
        rows = [targets[m].tolist() for m in members]
        new_targets.append([or_oracle(labels, unknown) for labels in zip(*rows, strict=True)])
    return torch.stack(new_images), torch.tensor(new_targets, dtype=targets.dtype)


def pair_oracle(method, images, targets, plan, unknown=-1):
    """The siblings, from the paper's appendix."""

    def label(own, other, lam):
        if method is MixupPME:
            if is_unknown(own, unknown):
                return unknown
            return lam * own + (1 - lam) * (0.5 if is_unknown(other, unknown) else other)
        own, other = (0 if is_unknown(y, unknown) else y for y in (own, other))
        return lam * own + (1 - lam) * other if method is Mixup else int(own == 1 or other == 1)

    new_images, new_targets = [], []
    for (i, j), (lam, _) in zip(plan.index.tolist(), plan.weight.double().tolist(), strict=True):
        new_images.append(lam * images[i].double() + (1 - lam) * images[j].double())
        new_targets.append([label(a, b, lam) for a, b in zip(targets[i].tolist(), targets[j].tolist(), strict=True)])
    return torch.stack(new_images), torch.tensor(new_targets)


def some_batch(batch=8, categories=5, shape=(3, 6, 4), unknown=-1, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((batch, *shape), generator=generator)
    images = (images * 256).floor().to(dtype) if dtype == torch.uint8 else images.to(dtype)
    targets = torch.randint(-1, 2, (batch, categories), generator=generator).float()
    return images.to(device), targets.masked_fill(targets == -1, unknown).to(device)


def assert_same(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def chi_square(observed):
    """p-value of equal frequencies."""
    return stats.chisquare(torch.as_tensor(observed).flatten().numpy()).pvalue


def counts(values, bins):
    return torch.bincount(values.flatten(), minlength=bins)
