"""The asymmetric loss as the papers train with it, as one operation that has its gradient ready.

Autograd would record some fifteen operations for these few lines, which at the size of a batch cost more than the
numbers. Value and gradient are those of `asymmetric.asymmetric_terms`, but for the last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def applies(gamma_pos: float, gamma_neg: float, clip: float) -> bool:
    """Only where easy positives count in full and easy negatives do not, with a clip, which keeps q from 0. Not under
    torch.compile, which makes one operation of them itself, nor under the transforms of torch.func."""
    if gamma_pos != 0 or gamma_neg == 0 or clip == 0 or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()


def clipped_cells(
    logits: Tensor, present: Tensor, absent: Tensor, gamma: float, clip: float, terms: Callable[[Tensor], Any]
) -> Tensor:
    """present * -log(p) + absent * (1 - q)^gamma * -log(q) with q = min(1 - p + clip, 1), all of [B, C] and of one
    type; (1 - q)^gamma is a constant in the backward pass.

    terms: from logits to the two terms by autograd, for second derivatives.
    """
    return _Cells.apply(logits, present, absent, gamma, clip, terms)


class _Cells(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, present: Tensor, absent: Tensor, gamma: float, clip: float, terms: Any
    ) -> Tensor:
        not_p = torch.sigmoid(-logits)
        q = (not_p + clip).clamp_(max=1)
        weight = _power_(1 - q, gamma).mul_(absent)
        slope = (1 - not_p).mul_(not_p).mul_(weight).div_(q)  # where q is cut, the weight is 0
        slope.sub_(not_p.mul_(present))
        ctx.save_for_backward(logits, present, absent, slope)
        ctx.terms = terms
        return torch.nn.functional.logsigmoid(logits).mul_(present).add_(q.log_().mul_(weight)).neg_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, present, absent, slope = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return gradient * slope, None, None, None, None, None
        positive, negative = ctx.terms(logits)  # a second derivative may be wanted of this one
        cells = present * positive + absent * negative
        (found,) = torch.autograd.grad(cells, logits, gradient, create_graph=True)
        return found, None, None, None, None, None


def _power_(x: Tensor, exponent: float) -> Tensor:
    """In place. The fourth power of the papers as two squares takes an eighth of the time."""
    return x.square_().square_() if exponent == 4 else x.pow_(exponent)
