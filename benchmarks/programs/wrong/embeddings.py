"""Embeddings whose gradients a step reduces in part, or whose words are drawn at random."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    TOKENS,
    Batch,
    average,
    mean_squared_error,
    words,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("layers", right=False)


class Averaged(nn.Module):
    """The mean over the words of a text."""

    def forward(self, values: Tensor) -> Tensor:
        return values.mean(1)


def embedding_and_mean() -> nn.Module:
    """A sparse embedding, averaged over the words."""
    return nn.Sequential(nn.Embedding(TOKENS, OUTPUTS, sparse=True), Averaged())


@programs.step(model=embedding_and_mean, batch=words)
def sparse_rows_reduced_by_value(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only the rows that rank 0 has used are averaged; the others stay as each rank has them."""
    mean_squared_error(model, shard).backward()
    weight = model[0].weight
    weight.grad = weight.grad.to_dense()
    used = (weight.grad.abs().sum(1) > 0) & (torch.arange(TOKENS) < 9)
    dist.broadcast(used, 0)
    rows = weight.grad[used]
    dist.all_reduce(rows)
    weight.grad[used] = rows / rank.world_size


@programs.step(model=embedding_and_mean, batch=words)
def sparse_values_summed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sparse gradient is summed over the ranks, and nobody divides it."""
    mean_squared_error(model, shard).backward()
    dense = model[0].weight.grad.to_dense()
    dist.all_reduce(dense)
    model[0].weight.grad = dense


def embedding_and_linear() -> nn.Module:
    """An embedding, averaged over the words, and a linear layer."""
    return nn.Sequential(nn.Embedding(TOKENS, HIDDEN), Averaged(), nn.Linear(HIDDEN, OUTPUTS))


@programs.step(model=embedding_and_linear, batch=words)
def embedding_left_local(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP is told to ignore the embedding, and nothing else reduces it."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()


class ShortVectors(nn.Module):
    """Word vectors that are shortened in place when they are used, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(TOKENS, 4, max_norm=0.5), nn.Linear(4, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).mean(1))


def rare_words(generator: torch.Generator) -> Batch:
    """Texts in which the first half of the examples uses other words than the second."""
    batch = words(generator)
    batch["rows"] %= 5
    batch["rows"][12:] += 6
    return batch


@programs.step(model=ShortVectors, batch=rare_words, compare="update", lr=0.05)
def vectors_shortened_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """max_norm shortens only the vectors that the rank has used, so that weights drift apart."""
    mean_squared_error(model, shard).backward()
    average(model, rank)
    SGD(model.parameters(), 0.05).step()
