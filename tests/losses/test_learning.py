"""Every loss of the registry teaches: a linear model on features from which labels can be read off."""

import pytest
import torch

from gpu_logicmix import GPULogicMix, hide_labels, mean_average_precision
from gpu_logicmix.losses import LOSSES, Batch, Output

OPTIONS = {"ll-r": ["delta=2"], "ll-ct": ["delta=1"], "ll-cp": ["delta=0.5"], "csl": ["prior=known"]}


@pytest.mark.parametrize("mix", [False, True], ids=["plain", "mixed"])
@pytest.mark.parametrize("known", [0.3, 1.0])
@pytest.mark.parametrize("name", LOSSES.names())
def test_a_linear_model_learns(name, known, mix):
    torch.manual_seed(0)
    features = torch.randn(400, 16)
    truth = (features @ torch.randn(16, 4) > 3).long()
    targets = hide_labels(truth, known)
    model = torch.nn.Linear(16, 4)
    start = mean_average_precision(model(features), truth)
    loss = LOSSES.make(name, OPTIONS.get(name))
    loss.prepare(targets, list("abcd"))
    blend, index = GPULogicMix(p=0.5), torch.arange(400)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(10):
        loss.set_epoch(epoch, 10)
        for _ in range(12):
            inputs, labels, mixed = features, targets, None
            if mix:
                plan = blend.plan(400)
                inputs, labels = blend(features[:, :, None, None], targets, plan)
                inputs, mixed = inputs.flatten(1), plan.mixed
            total, count = loss(Output(model(inputs)), Batch(labels, index, mixed, epoch))
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
    end = mean_average_precision(model(features), truth)
    assert start < 0.5
    assert end > 0.8, f"{start:.3f} -> {end:.3f}"
