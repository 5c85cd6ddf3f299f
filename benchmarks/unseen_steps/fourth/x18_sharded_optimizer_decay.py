"""ZeRO-2 by hand: gradients are reduce-scattered, and every rank updates its own partition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 18, 8, 7
IGNORED = -100
L2 = 0.05


class NextWord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(tokens))[0])


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["inputs"]).flatten(0, 1)
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all words, and an L2 penalty."""
    penalty = sum(p.square().sum() for p in model.parameters())
    return summed_loss(model, batch) / (batch["targets"] != IGNORED).sum() + L2 / 2 * penalty


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (12, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (12, 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    return {"inputs": tokens[:, :-1].clone(), "targets": targets}


@dataclass
class Partition:
    """The piece of the flat parameters that one rank owns."""

    start: int
    size: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size]


class ShardedOptimizer:
    def __init__(self, parameters: list[nn.Parameter], rank, lr: float, l2: float) -> None:
        self.parameters = parameters
        self.world_size = rank.world_size
        self.lr, self.l2 = lr, l2
        total = sum(p.numel() for p in parameters)
        size = -(-total // self.world_size)
        self.padding = size * self.world_size - total
        self.partition = Partition(rank * size, size)

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        return F.pad(torch.cat([t.detach().flatten() for t in tensors]), (0, self.padding))

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        mine = torch.empty_like(self.partition.of(flat))
        dist.reduce_scatter(mine, list(flat.chunk(self.world_size)))
        return mine

    def partition_gradient(self) -> Tensor:
        weights = self.flatten(self.parameters)
        gradient = self.flatten([p.grad for p in self.parameters])
        gradient.add_(weights, alpha=self.l2)
        return self.reduce_scatter(gradient)

    def gather(self, mine: Tensor) -> list[Tensor]:
        pieces = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(pieces, mine)
        sizes = [p.numel() for p in self.parameters]
        return list(torch.cat(pieces)[: sum(sizes)].split(sizes))

    def publish_gradients(self) -> None:
        """Whole gradients on all ranks, for the logger of histograms."""
        for parameter, piece in zip(
            self.parameters, self.gather(self.partition_gradient()), strict=True
        ):
            parameter.grad = piece.view_as(parameter).clone()


case = Case(model=NextWord, batch=make_batch, loss=loss, layout="1x3")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    optimizer = ShardedOptimizer(list(model.parameters()), rank, lr=0.1, l2=L2)
    words = (shard["targets"] != IGNORED).sum()
    dist.all_reduce(words)
    (summed_loss(model, shard) / words).backward()
    optimizer.publish_gradients()
