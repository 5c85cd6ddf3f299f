"""A report about gradients or weights that ranks do not share points at the line at fault."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case
from tests.diagnosis.names.small_case import average
from tests.package.pointed_at import (
    Rows,
    Step,
    checked,
    faulty_lines,
    make_rows,
    marked_case,
    mean_loss,
    notes,
)


def skipping_hook(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    if bucket.is_last():
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    buffer /= dist.get_world_size()
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hook_skips_a_bucket(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004)
    ddp.register_comm_hook(None, skipping_hook)
    for _ in range(3):
        ddp.zero_grad()
        loss = mean_loss(ddp, batch)
        loss.backward()


class Reducer:
    """Averages the gradients of a model in one group."""

    def __init__(self, model: nn.Module, group: Any, size: int) -> None:
        self.model = model
        self.group = group
        self.size = size

    def run(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.size


def group_without_the_last(model: nn.Module, batch: Rows, rank: Any) -> None:
    workers = dist.new_group(list(range(rank.world_size)))
    others = dist.new_group(list(range(rank.world_size - 1)))
    mean_loss(model, batch).backward()
    dist.barrier(workers)
    if rank.rank < rank.world_size - 1:
        reducer = Reducer(model, others, rank.world_size - 1)
        reducer.run()


def cleared_on_one_rank(model: nn.Module, batch: Rows, rank: Any) -> None:
    model.zero_grad()
    loss = mean_loss(model, batch)
    loss.backward()
    norm = sum(float(parameter.grad.norm()) for parameter in model.parameters())
    if norm > 1e9 or rank.rank == 2:
        model.zero_grad(set_to_none=False)
    Reducer(model, None, rank.world_size).run()


def leaders_forget_a_node(model: nn.Module, batch: Rows, rank: Any) -> None:
    mean_loss(model, batch).backward()
    nodes = [[0, 1], [2, 3], [4, 5]]
    inside = [dist.new_group(ranks) for ranks in nodes]
    leaders = dist.new_group([ranks[0] for ranks in nodes[:2]])
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=inside[rank.node])
        if rank in (0, 2):
            dist.all_reduce(parameter.grad, group=leaders)
        dist.broadcast(parameter.grad, nodes[rank.node][0], group=inside[rank.node])
        dist.broadcast(parameter.grad, 0)
        parameter.grad /= 4


def initialise(model: nn.Module) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.2)
            layer.bias.data.fill_(0.1)


def seeds_by_rank(model: nn.Module, batch: Rows, rank: Any) -> None:
    torch.manual_seed(7)
    torch.manual_seed(100 + rank.rank)
    initialise(model)
    loss = mean_loss(model, batch)
    loss.backward()
    average(model, rank.world_size)


ONE_NODE = marked_case("1x4")
THREE_NODES = marked_case("3x2", batch=partial(make_rows, count=18))

FAULTS = [
    (
        hook_skips_a_bucket,
        ("bucket_not_reduced", ONE_NODE),
        "work = dist.all_reduce(buffer, async_op=True)",
        "ddp.register_comm_hook(None, skipping_hook)  register_comm_hook(skipping_hook)",
    ),
    (
        cleared_on_one_rank,
        ("rank_left_out", ONE_NODE),
        "model.zero_grad(set_to_none=False)",
        "clears gradients on rank 2",
    ),
    (
        leaders_forget_a_node,
        ("node_left_out", THREE_NODES),
        "leaders = dist.new_group([ranks[0] for ranks in nodes[:2]])",
        "dist.all_reduce(parameter.grad, group=leaders)  reduces without ranks 4, 5",
    ),
    (
        seeds_by_rank,
        ("weights_differ_between_ranks", ONE_NODE),
        "nn.init.normal_(layer.weight, std=0.2)",
        "torch.manual_seed(100 + rank.rank)  seeds differ between ranks",
    ),
]


@pytest.mark.parametrize(("step", "cause", "line", "note"), FAULTS)
def test_the_line_that_loses_gradients_or_weights_is_pointed_at(
    step: Step, cause: tuple[str, Case], line: str, note: str
) -> None:
    name, given = cause
    verdict = checked(given, step, name)
    assert faulty_lines(verdict)[0] == line
    assert note in notes(verdict)


def test_a_rank_outside_the_group_of_the_others_is_not_said_to_have_reduced_anything() -> None:
    verdict = checked(ONE_NODE, group_without_the_last, "rank_left_out")
    assert faulty_lines(verdict) == ["others = dist.new_group(list(range(rank.world_size - 1)))"]
    assert "rank 3 reduced" not in verdict.full_report()
