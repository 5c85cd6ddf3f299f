"""Programs without a known cause: the report says where the difference is, and what to change."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.diagnosis.fixes.programs import Batch, shows
from tests.diagnosis.names.small_case import average, case
from tests.package.own_cases import loss

RADIUS = 0.05


def at_the_worst_place(model: nn.Module, batch: Batch) -> Tensor:
    """The loss where a step uphill leads to."""
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss(model, batch), list(weights.values()))
    moved = {n: w + RADIUS * g for (n, w), g in zip(weights.items(), found, strict=True)}
    outputs = functional_call(model, moved, (batch["rows"],))
    return F.mse_loss(outputs, batch["targets"])


@shows("", "", {}, case(loss=at_the_worst_place))
def sam_has_a_wrong_factor(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank.world_size)
    moved = [RADIUS * parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), moved, strict=True):
            parameter += change
    model.zero_grad()
    (2 * loss(model, shard)).backward()
    average(model, rank.world_size)
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), moved, strict=True):
            parameter -= change


@shows("", "", {}, case(loss=at_the_worst_place))
def sam_does_not_reduce_the_second_pass(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    moved = [RADIUS * parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), moved, strict=True):
            parameter += change
    model.zero_grad()
    with ddp.no_sync():
        (loss(ddp, shard)).backward()
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), moved, strict=True):
            parameter -= change


@shows(
    "stale_gradient_added",
    "clear the gradients of all parameters (zero_grad) before this backward pass.",
    {
        "            parameter += change\n": "            parameter += change\n"
        "    model.zero_grad()\n"
    },
    case(loss=at_the_worst_place),
)
def sam_keeps_the_first_gradient(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    moved = [RADIUS * parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), moved, strict=True):
            parameter += change
    loss(ddp, shard).backward()
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), moved, strict=True):
            parameter -= change


@shows(
    "",
    "leave the gradients as they were before the marked line.",
    {"        parameter.grad = kept": "        pass"},
)
def writes_a_stale_clone(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    first, second = ({n: leaf[k::2] for n, leaf in shard.items()} for k in (0, 1))
    (loss(ddp, first) / 2).backward()
    stale = [parameter.grad.clone() for parameter in model.parameters()]
    (loss(ddp, second) / 2).backward()
    for parameter, kept in zip(model.parameters(), stale, strict=True):
        parameter.grad = kept


@shows("", "", {}, case(shards="4+8"))
def joins(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with ddp.join():
        for rows, targets in zip(shard["rows"].split(4), shard["targets"].split(4), strict=True):
            (F.mse_loss(ddp(rows), targets) / 3).backward()


@shows(
    "",
    "divide each loss by 3, not by 2, or put this factor into the loss of the big batch as well.",
    {"rank.world_size).backward": "3).backward"},
)
def divides_by_the_ranks_in_place_of_micro_batches(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        (F.mse_loss(ddp(rows), targets) / rank.world_size).backward()


@shows(
    "",
    "leave this factor out, or put this factor into the loss of the big batch as well.",
    {" * 1.3": ""},
)
def multiplies_the_loss(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (F.mse_loss(ddp(shard["rows"]), shard["targets"]) * 1.3).backward()


class Heads(nn.Module):
    """A left head, and a right one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, rows: Tensor, side: Tensor) -> Any:
        return torch.where(side[:, None], self.left(rows), self.right(rows))


def of_sides(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"], batch["side"]), batch["targets"])


def with_sides(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(12, 5, generator=generator),
        "targets": torch.randn(12, 3, generator=generator),
        "side": torch.arange(12) < 6,
    }


SIDES = case(model=Heads, loss=of_sides, batch=with_sides)


@shows(
    "",
    "reduce the same parameters in the same order on every rank, with zeros for those that "
    "have no gradient.",
    {
        "    used": "    for parameter in model.parameters():\n"
        "        if parameter.grad is None:\n"
        "            parameter.grad = torch.zeros_like(parameter)\n"
        "    used"
    },
    SIDES,
)
def adds_up_gradients_of_different_heads(model: Any, shard: Batch, rank: Rank) -> None:
    head = model.left if bool(shard["side"].all()) else model.right
    F.mse_loss(head(shard["rows"]), shard["targets"]).backward()
    used = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in used:
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
