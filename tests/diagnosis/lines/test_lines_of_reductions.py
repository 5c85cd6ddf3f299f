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
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes, rows

Batch = dict[str, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["x"])
    return nn.functional.mse_loss(outputs, batch["y"])


def ddp_ignores_one(model: nn.Module, batch: Batch, rank: Any) -> None:
    names = ["4.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    loss = loss_of(ddp, batch)
    loss.backward()


def skipping_hook(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    if bucket.is_last():
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    buffer /= dist.get_world_size()
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hook_skips_a_bucket(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004)
    ddp.register_comm_hook(None, skipping_hook)
    for _ in range(3):
        ddp.zero_grad()
        loss = loss_of(ddp, batch)
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


def group_without_the_last(model: nn.Module, batch: Batch, rank: Any) -> None:
    workers = dist.new_group(list(range(rank.world_size)))
    others = dist.new_group(list(range(rank.world_size - 1)))
    loss_of(model, batch).backward()
    dist.barrier(workers)
    if rank.rank < rank.world_size - 1:
        reducer = Reducer(model, others, rank.world_size - 1)
        reducer.run()


def cleared_on_one_rank(model: nn.Module, batch: Batch, rank: Any) -> None:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    norm = sum(float(parameter.grad.norm()) for parameter in model.parameters())
    if norm > 1e9 or rank.rank == 2:
        model.zero_grad(set_to_none=False)
    Reducer(model, None, rank.world_size).run()


def leaders_forget_a_node(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss_of(model, batch).backward()
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


def returns_early(model: nn.Module, batch: Batch, rank: Any) -> None:
    workers = dist.new_group([0, 1, 2])
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        if rank.rank == 3:
            continue
        dist.all_reduce(parameter.grad, group=workers)
        parameter.grad /= rank.world_size
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0)


def average(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def initialise(model: nn.Module) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.2)
            layer.bias.data.fill_(0.1)


def seeds_by_rank(model: nn.Module, batch: Batch, rank: Any) -> None:
    torch.manual_seed(7)
    torch.manual_seed(100 + rank.rank)
    initialise(model)
    loss = loss_of(model, batch)
    loss.backward()
    average(model, rank.world_size)


def loads_on_rank_0(model: nn.Module, batch: Batch, rank: Any) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    if rank.rank == 0:
        model.load_state_dict(state)
    loss_of(model, batch).backward()
    average(model, rank.world_size)


def broadcasts_only_matrices(model: nn.Module, batch: Batch, rank: Any) -> None:
    torch.manual_seed(rank.rank)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            dist.broadcast(parameter.data, 0)
    loss_of(model, batch).backward()
    average(model, rank.world_size)


CASE = case()

REDUCTIONS = [
    (
        ddp_ignores_one,
        "parameter_not_reduced",
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)",
        "ddp = DistributedDataParallel(model)  DDP did not reduce 4.bias",
        "do not let DDP ignore 4.bias.",
    ),
    (
        hook_skips_a_bucket,
        "bucket_not_reduced",
        "work = dist.all_reduce(buffer, async_op=True)",
        "ddp.register_comm_hook(None, skipping_hook)  register_comm_hook(skipping_hook)",
        "let the communication hook reduce every bucket, also that of 0.bias, 0.weight.",
    ),
]


@pytest.mark.parametrize(("step", "cause", "line", "note", "fix"), REDUCTIONS)
def test_the_line_that_reduces_wrongly_is_pointed_at(
    step: Step, cause: str, line: str, note: str, fix: str
) -> None:
    verdict = checked(CASE, step, cause)
    assert (faults(verdict)[0], verdict.findings[0].fix) == (line, fix)
    assert note in notes(verdict)


ONE_NODE = case()
TWO_NODES = case("2x2")
THREE_NODES = case("3x2", batch=partial(rows, count=18))

LEFT_OUT = [
    (
        ONE_NODE,
        cleared_on_one_rank,
        "rank_left_out",
        "model.zero_grad(set_to_none=False)",
        "clears gradients on rank 2",
        "keep the gradients of rank 2, and divide by 4.",
    ),
    (
        THREE_NODES,
        leaders_forget_a_node,
        "node_left_out",
        "leaders = dist.new_group([ranks[0] for ranks in nodes[:2]])",
        "dist.all_reduce(parameter.grad, group=leaders)  reduces without ranks 4, 5",
        "let ranks 4, 5 take part in an all_reduce of all 6 ranks, and divide by 6.",
    ),
]


@pytest.mark.parametrize(("given", "step", "cause", "line", "note", "fix"), LEFT_OUT)
def test_the_line_that_loses_gradients_of_ranks_is_pointed_at(
    given: Case, step: Step, cause: str, line: str, note: str, fix: str
) -> None:
    verdict = checked(given, step, cause)
    assert (faults(verdict), verdict.findings[0].fix) == ([line], fix)
    assert note in notes(verdict)


def test_a_rank_outside_the_group_of_the_others_is_not_said_to_have_reduced_anything() -> None:
    verdict = checked(ONE_NODE, group_without_the_last, "rank_left_out")
    assert faults(verdict) == ["others = dist.new_group(list(range(rank.world_size - 1)))"]
    assert "rank 3 reduced" not in verdict.full_report()


WEIGHTS = [
    (
        seeds_by_rank,
        "nn.init.normal_(layer.weight, std=0.2)",
        "torch.manual_seed(100 + rank.rank)  seeds differ between ranks",
        "a broadcast of all weights from rank 0",
    ),
    (
        loads_on_rank_0,
        "model.load_state_dict(state)",
        "changes 0.weight, 0.bias and 4 more; the weights differ between ranks from here on",
        "a broadcast of all weights from rank 0",
    ),
    (
        broadcasts_only_matrices,
        "dist.broadcast(parameter.data, 0)",
        "broadcast of 0.weight, 2.weight, 4.weight in one group; weights differ after it",
        "",
    ),
]


@pytest.mark.parametrize(("step", "line", "note", "missing"), WEIGHTS)
def test_the_line_that_makes_weights_differ_is_pointed_at(
    step: Step, line: str, note: str, missing: str
) -> None:
    verdict = checked(case(), step, "weights_differ_between_ranks")
    (fault,) = (one for one in verdict.findings[0].lines if one.is_fault)
    assert (faults(verdict), fault.missing) == ([line], missing)
    assert note in notes(verdict)
    assert verdict.findings[0].fix == (
        "broadcast all 6 parameters from rank 0 before the first forward pass."
    )
