"""Steps whose ranks share other things than rows, or send numbers; faulty at ``# fault``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.where.faulty import average

LENGTH, WIDTH, HIDDEN = 8, 5, 6


class Tagger(nn.Module):
    """Scores every place of a sequence by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, rows: Tensor, places: Tensor) -> Any:
        return self.head(torch.tanh(rows + self.places(places)))


def sequences(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(6, LENGTH, WIDTH, generator=generator),
        "targets": torch.randn(6, LENGTH, 3, generator=generator),
        "weights": torch.rand(6, LENGTH, generator=generator),
    }


def weighted_sum(scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return ((scores - targets).square().sum(-1) * weights).sum()


def tagger_loss(model: Any, batch: dict[str, Tensor]) -> Any:
    scores = model(batch["rows"], torch.arange(LENGTH))
    return weighted_sum(scores, batch["targets"], batch["weights"]) / batch["weights"].sum()


def add_up(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def other_weights_than_places(model: Any, shard: Any, rank: Any) -> None:
    """The ranks take turns, and the weights are those of halves."""
    turns = slice(rank.rank, None, rank.world_size)
    scores = model(shard["rows"][:, turns], torch.arange(LENGTH)[turns])
    targets = shard["targets"][:, turns]
    weights = shard["weights"].chunk(rank.world_size, dim=1)[rank.rank]  # fault
    value = weighted_sum(scores, targets, weights)
    (value / shard["weights"].sum()).backward()
    add_up(model)


class Halves:
    """Rank r has the r-th half of each sequence."""

    def __init__(self, rank: Any) -> None:
        self.rank, self.world_size = rank.rank, rank.world_size

    @property
    def mine(self) -> Tensor:
        mine: Tensor = torch.arange(LENGTH).chunk(self.world_size)[self.rank]
        return mine

    def taken(self, *values: Tensor) -> Iterator[Tensor]:
        for value in values:
            yield value[:, self.mine]

    @property
    def positions(self) -> Tensor:
        places = torch.arange(LENGTH)
        return places.view(-1, self.world_size)[:, self.rank]  # fault


def places_of_others(model: Any, shard: Any, rank: Any) -> None:
    halves = Halves(rank)
    rows, targets, weights = halves.taken(shard["rows"], shard["targets"], shard["weights"])
    scores = model(rows, halves.positions)
    (weighted_sum(scores, targets, weights) / shard["weights"].sum()).backward()
    add_up(model)


class Block(nn.Module):
    """A residual block whose hidden units can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Any:
        return rows + self.down(torch.tanh(self.up(rows)))


def rows_only(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(8, WIDTH, generator=generator),
        "targets": torch.randn(8, WIDTH, generator=generator),
    }


def block_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


class Summed(torch.autograd.Function):
    """The sum over a group; every rank of it goes on with the same."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def residual_on_every_rank(model: Any, shard: Any, rank: Any) -> None:
    """Ranks of a node split the hidden units, and nodes split the rows."""
    groups = [
        dist.new_group(list(range(first, first + rank.local_world_size)))
        for first in range(0, rank.world_size, rank.local_world_size)
    ]
    mine = torch.arange(HIDDEN).chunk(rank.local_world_size)[rank.local_rank]
    rows, targets = (shard[name].chunk(rank.nodes)[rank.node] for name in ("rows", "targets"))
    hidden = torch.tanh(F.linear(rows, model.up.weight[mine], model.up.bias[mine]))
    part = F.linear(hidden, model.down.weight[:, mine])
    part = part + rows  # fault
    summed: Any = Summed.apply
    F.mse_loss(summed(part, groups[rank.node]) + model.down.bias, targets).backward()
    split = {model.up.weight, model.up.bias, model.down.weight}
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.nodes if parameter in split else rank.world_size


def counted(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(12, 6, generator=generator),
        "targets": torch.randn(12, 3, generator=generator),
        "counts": torch.randint(1, 9, (12,), generator=generator),
    }


def summed_errors(model: Any, batch: dict[str, Tensor]) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square().sum(1)
    return (errors * batch["counts"]).sum()


def counted_loss(model: Any, batch: dict[str, Tensor]) -> Any:
    return summed_errors(model, batch) / batch["counts"].sum()


def largest_count_of_a_message(model: Any, shard: Any, rank: Any) -> None:
    message = torch.tensor([int(shard["counts"].sum()), int(shard["counts"].max())])
    dist.all_reduce(message, dist.ReduceOp.MAX)  # fault
    total, _ = message.tolist()
    (summed_errors(model, shard) / total).backward()
    add_up(model)


class Pooled(nn.Module):
    """Standardises its outputs over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.everyone: Callable[[Tensor], Tensor] = lambda one: one

    def forward(self, rows: Tensor) -> Any:
        output = self.layer(rows)
        sums = torch.stack([output.sum(0), output.square().sum(0), torch.ones_like(output).sum(0)])
        total, square, count = self.everyone(sums)
        mean = total / count
        return (output - mean) / (square / count - mean.square() + 0.1).sqrt()


def pooled_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.l1_loss(model(batch["rows"]), batch["targets"])


def moments_without_a_gradient(model: Any, shard: Any, rank: Any) -> None:
    def everyone(sums: Tensor) -> Tensor:
        dist.all_reduce(sums)  # fault
        return sums

    logged = []
    model.everyone = everyone
    value = pooled_loss(model, shard)
    copy = value.clone()
    dist.all_reduce(copy)  # only for the log, so nothing of it comes back
    logged.append(copy.item())
    value.backward()
    average(model)
