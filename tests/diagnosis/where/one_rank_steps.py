"""Steps that are right on one rank, and part from it at the line marked ``# fault``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.where.faulty import average, loss


class Scores(nn.Module):
    """Scores of pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(rows)), torch.tanh(self.right(rows))


def pair_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    left, right = model(batch["rows"])
    return nn.functional.cross_entropy(left @ right.T, torch.arange(len(left)))


def weighted_rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(16, 6, generator=generator),
        "targets": torch.randn(16, 3, generator=generator),
        "gain": torch.linspace(0.5, 6.0, 16),
    }


def relative_gain_loss(model: Any, batch: dict[str, Tensor]) -> Any:
    return weighed(model, batch, batch["gain"].max())


def weighed(model: Any, batch: dict[str, Tensor], largest: Tensor) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square().mean(dim=1)
    return (errors * batch["gain"] / largest).mean()


def largest_of_the_rank(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    largest = shard["gain"].max()  # fault
    weighed(ddp, shard, largest).backward()


def penalty_in_every_term(model: Any, shard: Any, rank: Any) -> None:
    size = shard["rows"].shape[0] * rank.world_size
    errors = (model(shard["rows"]) - shard["targets"]).square().sum() / 3
    value = errors / size
    value = value + 0.1 * model.head.weight.square().sum()  # fault
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def with_penalty(model: Any, examples: dict[str, Tensor]) -> Any:
    penalty = 0.1 * model.head.weight.square().sum()
    return loss(model, examples) + penalty


def own_rows_only_on_the_way_back(model: Any, shard: Any, rank: Any) -> None:
    class Gathered(torch.autograd.Function):
        """Its backward leaves out what other ranks' losses make of the own rows."""

        @staticmethod
        def forward(ctx: Any, own: Tensor) -> Tensor:
            ctx.rows = own.shape[0]
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own.contiguous())
            return torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            start = ctx.rows * dist.get_rank()
            return gradients[0][start : start + ctx.rows].clone()  # fault

    ddp = DistributedDataParallel(model)
    left, right = ddp(shard["rows"])
    gather: Any = Gathered.apply
    everyone = gather(right)
    first = rank.rank * left.shape[0]
    labels = torch.arange(first, first + left.shape[0])
    nn.functional.cross_entropy(left @ everyone.T, labels).backward()


def summed_in_the_wrong_direction(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        padded = nn.functional.pad(parameter.grad.flatten(), (0, -parameter.numel() % 4))
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded)
        mine = received.reshape(-1, rank.world_size).mean(dim=1)  # fault
        whole = torch.empty_like(mine).repeat(rank.world_size)
        dist.all_gather_into_tensor(whole, mine)
        parameter.grad = whole[: parameter.numel()].view_as(parameter)


def sends_to_a_neighbour(model: Any, shard: Any, rank: Any) -> None:
    """It is wrong, and nobody may wait for a send before the other rank receives."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        incoming = torch.zeros_like(parameter.grad)
        if rank.world_size > 1:
            sent: Any = dist.isend(parameter.grad.clone(), (rank.rank + 1) % rank.world_size)
            dist.recv(incoming, (rank.rank - 1) % rank.world_size)
            sent.wait()
        parameter.grad += torch.tanh(incoming)


def needs_two_ranks(model: Any, shard: Any, rank: Any) -> None:
    assert rank.world_size > 1, "this step is for several ranks"
    loss(model, shard).backward()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad *= 1 + 0.1 * number + rank.rank


def wrong_on_any_number_of_ranks(model: Any, shard: Any, rank: Any) -> None:
    value = nn.functional.l1_loss(model(shard["rows"]), shard["targets"])
    value.backward()
    average(model)


def noisy(model: Any, shard: Any, rank: Any) -> None:
    rows = shard["rows"] + 0.1 * torch.randn_like(shard["rows"])
    nn.functional.mse_loss(model(rows), shard["targets"]).backward()
    average(model)


def loops_over_what_the_rank_has(model: Any, shard: Any, rank: Any) -> None:
    """The loop is shorter on every rank than on one, and right; the line below it is not."""
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(shard["rows"], shard["targets"], strict=True):
        total = total + nn.functional.mse_loss(model(row), target)
    spread = shard["gain"].std(unbiased=False)  # fault
    (total / len(shard["rows"]) / spread).backward()
    average(model)


def by_spread(model: Any, batch: dict[str, Tensor]) -> Any:
    return loss(model, batch) / batch["gain"].std(unbiased=False)
