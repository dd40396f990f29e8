"""A genetic algorithm on AP itself."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_logicmix.cft.heldout import head_average_precision
from gpu_logicmix.cft.options import CFTOptions
from gpu_logicmix.cft.products import pieces


class Genetic:
    """Breeds heads for AP on the labels `fit` [C, N]; the fittest of each category is its head.

    The numbers are the authors': parents are drawn in proportion to their AP, a child has each weight from
    one of them with probability 0.2, else from the other, every second child is mutated, the fittest lives on as it is.
    Unlike with Adam, what a head becomes depends on the others: the random numbers are drawn for all of them together.
    """

    def __init__(
        self, features: Tensor, fit: Tensor, heads: list[Tensor], options: CFTOptions, generator: torch.Generator
    ) -> None:
        self.features, self.heads, self.mutation = features, heads, options.mutation
        self.rows = [(labels != -1).nonzero()[:, 0] for labels in fit]
        self.labels = [labels[rows] for labels, rows in zip(fit, self.rows, strict=True)]
        self.people = torch.cat(heads, dim=1)[:, None].repeat(1, options.population, 1)  # [C, P, D + 1]
        self.generator = torch.Generator(fit.device).manual_seed(generator.initial_seed())

    def epoch(self, active: Tensor) -> None:
        people = self.people[active]
        fitness = torch.stack([self._fitness(c, some) for c, some in zip(active.tolist(), people, strict=True)])
        fittest = people[torch.arange(len(people), device=people.device), fitness.argmax(1)]
        self.heads[0][active], self.heads[1][active] = fittest[:, :-1], fittest[:, -1:]
        mother, father = (self._draw(people, fitness) for _ in range(2))
        children = torch.where(self._random(people) < 0.2, mother, father)
        mutated = self._random(people[:, :, :1]) < 0.5
        children += (self._random(people) * 2 - 1).mul_(self.mutation) * mutated
        children[:, 0] = fittest
        self.people[active] = children

    def _fitness(self, category: int, people: Tensor) -> Tensor:
        weight, bias = people[:, :-1], people[:, -1]
        logits = [torch.addmm(bias, x, weight.t()) for x in pieces(self.features, self.rows[category], people)]
        ap = head_average_precision(torch.cat(logits).t(), self.labels[category].expand(len(people), -1))[0]
        return ap.nan_to_num(0) + 1e-12  # a head that overflowed has no children

    def _draw(self, people: Tensor, fitness: Tensor) -> Tensor:
        chosen = torch.multinomial(fitness, people.shape[1], replacement=True, generator=self.generator)
        return people.gather(1, chosen[:, :, None].expand_as(people))

    def _random(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=self.generator)
