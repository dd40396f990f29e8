"""How hard are the drawn shapes? A small network, trained for a couple of minutes on a CPU.

python bench/shapes.py                              # all labels known
python bench/shapes.py --known 0.1                  # one in ten
python bench/shapes.py --known 0.1 --p 0.5          # the same with LogicMix
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix import GPULogicMix, hide_labels, open_dataset
from gpu_logicmix.data import make_loader


def network(categories: int) -> nn.Module:
    """Five convolutions, 0.25 million weights."""
    layers, last = [], 3
    for width, stride in ((24, 2), (48, 2), (96, 1), (96, 2), (128, 1)):
        layers += [nn.Conv2d(last, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        last = width
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(last, categories))


def average_precision(scores: Tensor, targets: Tensor) -> float:
    hits = targets[scores.argsort(descending=True)].float()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / hits.sum())


def loss_of_known(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.binary_cross_entropy_with_logits(logits, targets.clamp(min=0).float(), reduction="none")
    known = targets >= 0
    return (loss * known).sum() / known.sum().clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--known", type=float, default=1.0)
    parser.add_argument("--p", type=float, default=0.0, help="LogicMix: share of samples that are mixed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    start = time.perf_counter()
    train, val = (open_dataset("shapes", split, options.size) for split in ("train", "val"))
    train.labels = hide_labels(train.labels, options.known, options.seed)
    images = train[range(len(train))][0].float().div_(255)  # drawn once; 200 MB at 64
    val_images = val[range(len(val))][0].float().div_(255)
    print(f"drew {len(train) + len(val):,} pictures in {time.perf_counter() - start:.1f} s")

    model, mix = network(len(train.categories)).to(memory_format=torch.channels_last), GPULogicMix(options.p)
    batches = make_loader(train, 64, shuffle=True, seed=options.seed, drop_last=True).sampler
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.epochs * len(batches))
    targets, start = torch.from_numpy(train.labels), time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        for rows in batches:
            x, y = images[rows], targets[rows]
            flip = torch.rand(len(x)) < 0.5
            x, y = mix(torch.where(flip[:, None, None, None], x.flip(3), x), y)
            loss = loss_of_known(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            scores = torch.cat([model(part) for part in val_images.split(250)])
        precisions = [
            average_precision(scores[:, c], torch.from_numpy(val.labels[:, c])) for c in range(scores.shape[1])
        ]
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1:2}, {seconds:4.0f} s: mAP {100 * sum(precisions) / len(precisions):.1f}", flush=True)
    print(", ".join(f"{name} {100 * ap:.0f}" for name, ap in zip(val.categories, precisions, strict=True)))


if __name__ == "__main__":
    main()
