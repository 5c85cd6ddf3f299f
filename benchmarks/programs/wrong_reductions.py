"""Training loops that reduce their gradients by hand, with one thing wrong each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.programs.common import Batch, gradients
from benchmarks.programs.training_loop import Loop, Setting
from benchmarks.programs.wrong_loops import nothing
from ddp_equivalence import Rank


def summed(module: nn.Module) -> list[Tensor]:
    """All gradients, each summed over the ranks."""
    for gradient in gradients(module):
        dist.all_reduce(gradient)
    return gradients(module)


class ReducesNothing(Loop):
    """The loop over the gradients is missing."""

    reduce = nothing


class LeavesOutAParameter(Loop):
    """The last parameter is not reduced."""

    def reduce(self) -> None:
        for gradient in gradients(self.wrapper.module)[:-1]:
            dist.all_reduce(gradient)
            gradient /= self.rank.world_size


class SumsOverRanks(Loop):
    """Gradients are summed over the ranks, and not divided."""

    def reduce(self) -> None:
        summed(self.wrapper.module)


class SumsTwice(Loop):
    """Gradients are summed over the ranks twice, and divided once."""

    def reduce(self) -> None:
        summed(self.wrapper.module)
        super().reduce()


class DividesByEight(Loop):
    """Gradients are divided by the 8 ranks of another machine."""

    def reduce(self) -> None:
        for gradient in summed(self.wrapper.module):
            gradient /= 8


class DividesByRanksOfANode(Loop):
    """Gradients are divided by the number of ranks on one node."""

    def reduce(self) -> None:
        for gradient in summed(self.wrapper.module):
            gradient /= self.rank.local_world_size


class ReducesInsideNodes(Loop):
    """Gradients are averaged over the ranks of each node only."""

    def __init__(self, setting: Setting, model: nn.Module, rank: Rank) -> None:
        super().__init__(setting, model, rank)
        size, nodes = rank.local_world_size, rank.nodes
        self.groups = [dist.new_group(list(range(n * size, n * size + size))) for n in range(nodes)]

    def reduce(self) -> None:
        for gradient in gradients(self.wrapper.module):
            dist.all_reduce(gradient, group=self.groups[self.rank.node])
            gradient /= self.rank.local_world_size


class LeavesOutARank(Loop):
    """The last rank clears its gradients before they are reduced."""

    def reduce(self) -> None:
        if self.rank.rank == self.rank.world_size - 1:
            for gradient in gradients(self.wrapper.module):
                gradient.zero_()
        super().reduce()


class ReducesACopy(Loop):
    """A flat copy of the gradients is reduced, and not written back."""

    def reduce(self) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients(self.wrapper.module)])
        dist.all_reduce(flat)
        flat /= self.rank.world_size


class ReducesParameters(Loop):
    """The parameters are reduced where their gradients were meant."""

    def reduce(self) -> None:
        for parameter in self.wrapper.module.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= self.rank.world_size


class ReducesInBfloat16(Loop):
    """Gradients are reduced in bfloat16."""

    def reduce(self) -> None:
        for gradient in gradients(self.wrapper.module):
            narrow = gradient.bfloat16()
            dist.all_reduce(narrow)
            gradient.copy_(narrow / self.rank.world_size)


class AddsAPenaltyLater(Loop):
    """A second backward runs after the gradients were reduced."""

    def reduce(self) -> None:
        super().reduce()
        self.loss(self.last).backward()

    def loss(self, examples: Batch) -> Tensor:
        self.last = examples
        return super().loss(examples)


class ClipsBeforeReducing(Loop):
    """Every rank clips its own gradients, and then they are averaged."""

    def reduce(self) -> None:
        super().clip()
        super().reduce()

    clip = nothing
