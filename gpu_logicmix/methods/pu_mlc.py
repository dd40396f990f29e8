"""PU-MLC: learning from positives and unlabeled labels, with mixup consistency and local-global convolutions.

Yuan et al., "Positive Label Is All You Need for Multi-Label Classification", ICME 2024,
https://arxiv.org/abs/2306.16016; code: TAKELAMAG/PU-MLC. Its loss is `--loss pu-mlc` (losses/pu.py), with which this
head is meant to be used: `--head pu-mlc --loss pu-mlc`.

- Mixup consistency: the batch is halved, one half is shuffled and mixed with the other, x = lambda x1 + (1 - lambda) x2
  with lambda from Beta(0.3, 0.3). The labels are mixed alike, where a label is 1 if it is known to be present and else
  what the model says, with its gradient. Added is the sum over categories of the mean of
  (log of the mixed label - log of the probability of the mixed image)^2.
- Local-global convolution: every 3x3 convolution of the backbone gets a branch beside it that sees the whole image.

The authors' head is the one of the SST and SARB papers, on word vectors; here it is linear. They keep all batch norms
in eval mode (`--batch-norm eval`) and train the last stage and the branches alone. Samples that LogicMix has mixed stay
out of the mixup: their labels are those of more images already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Loss, LossSum, Output, check_at_least_zero
from gpu_logicmix.losses.pu import consistency_cells
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.plain import LinearHead


@HEADS.register("pu-mlc")
class PUMLCHead(LinearHead):
    """A linear head with PU-MLC's mixup consistency. Use with `--loss pu-mlc`.

    consistency: weight of the mixup consistency; 0: none.
    beta: of the distribution that lambda is drawn from.
    local_global: put a global branch beside every 3x3 convolution of the backbone.
    dropout: before the linear layer.
    """

    def __init__(
        self,
        features: int,
        categories: int,
        consistency: float = 1.0,
        beta: float = 0.3,
        local_global: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(features, categories, dropout)
        check_at_least_zero(consistency=consistency)
        if not beta > 0:
            raise ValueError(f"beta={beta!r}: must be above 0")
        self.consistency, self.beta, self.local_global = consistency, beta, local_global

    def adapt(self, backbone: nn.Module) -> None:
        if self.local_global:
            add_local_global(backbone)

    def training_step(self, net: nn.Module, views: Sequence[Tensor], batch: Batch, loss: Loss) -> LossSum:
        images, half = views[0], len(views[0]) // 2
        if not half or not self.consistency:
            return super().training_step(net, views, batch, loss)
        order = torch.randperm(half, device=images.device)
        lam = _beta(self.beta, images.device)
        blended = torch.lerp(images[half : 2 * half], images[order], lam.to(images.dtype))
        # One pass for images and blends: several processes average gradients once.
        output = net(torch.cat((images, blended)), batch)
        logits, of_blends = output.logits.split((len(images), half))
        main = loss(Output(logits, output.extra), batch)
        soft = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid().masked_fill(batch.targets == 1, 1)
        cells = consistency_cells(of_blends, torch.lerp(soft[half : 2 * half], soft[order], lam))
        if batch.mixed is not None:
            original = ~batch.mixed
            pairs = (original[half : 2 * half] & original[order])[:, None].to(cells.dtype)
            own = (cells * pairs).sum(0) / pairs.sum().clamp(min=1)
        else:
            own = cells.mean(0)
        # The sum over categories beside PU-MLC's own sum, and the mean beside the mean of another loss.
        return LossSum(main.total + self.consistency * own.mean() * main.count, main.count)


def _beta(beta: float, device: torch.device) -> Tensor:
    """A number from Beta(beta, beta), on the device. As a ratio of Gammas in logarithms, which for a small `beta` can
    both be 0: Gamma(beta) = Gamma(beta + 1) * U^(1 / beta)."""
    gamma = torch._standard_gamma(torch.full((2,), beta + 1.0, device=device))
    uniform = torch.rand(2, device=device).clamp(min=torch.finfo(torch.float32).tiny)
    return (gamma.log() + uniform.log() / beta).softmax(0)[0]


# --------------------------------------------------------------------------------------------- local-global convolution
class LocalGlobalConv2d(nn.Conv2d):
    """A convolution plus a branch that sees the whole image and starts out as almost nothing. It has the convolution's
    own parameters under their own names; the branch is `around`."""

    around: GlobalBranch

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.around(x)


class GlobalBranch(nn.Module):
    """Values are pooled over all positions with one set of weights and spread over them with another, in `heads`
    groups of channels."""

    def __init__(self, channels: int, out: int, stride: tuple[int, ...], heads: int = 8) -> None:
        super().__init__()
        reduced = max(1, channels // 4)
        self.reduce = nn.Conv2d(channels, reduced, 1)
        self.gather = nn.Conv2d(2 * reduced, heads, 1)
        self.spread = nn.Conv2d(2 * reduced, heads, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.project = nn.Conv2d(channels, out, 1, stride=stride)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(out)
        nn.init.normal_(self.norm.weight, 0, 1e-4)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        local = self.reduce(x).relu()
        both = torch.cat((local, local.mean((2, 3), keepdim=True).expand_as(local)), 1)
        gather = self.gather(both).flatten(2).softmax(2)  # [B, heads, positions]
        spread = self.spread(both).flatten(2).sigmoid()
        value = self.value(x).flatten(2).unflatten(1, (self.heads, -1))  # [B, heads, channels of a head, positions]
        pooled = torch.einsum("bhp,bhcp->bhc", gather, value)
        seen = torch.einsum("bhp,bhc->bhcp", spread, pooled).flatten(1, 2).view_as(x)
        return self.norm(self.project(x + seen))


def add_local_global(backbone: nn.Module, heads: int = 8) -> int:
    """Put a global branch beside every 3x3 convolution whose channels `heads` divides; how many there are. The
    first one, which sees the image, is left as it is."""
    found = [
        conv
        for conv in backbone.modules()
        if type(conv) is nn.Conv2d
        and conv.kernel_size == (3, 3)
        and conv.padding == conv.dilation  # else the two sides would be of different size
        and conv.in_channels % heads == 0
    ]
    if not found:
        kind = type(backbone).__name__
        raise ValueError(f"local_global: {kind} has no 3x3 convolution with a multiple of {heads} channels")
    for conv in found:
        conv.__class__ = LocalGlobalConv2d  # its parameters keep their names
        conv.around = GlobalBranch(conv.in_channels, conv.out_channels, conv.stride, heads)
    return len(found)
