"""Wrong reductions have a name and the faulty line; what only looks like them has not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import accepted, assert_named, case_of, different, first_finding
from tests.diagnosis.names.small_case import average
from tests.package.own_cases import loss
from tests.package.pointed_at import lines_shown

pytestmark = pytest.mark.self_check

Batch = dict[str, Tensor]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def parts(shard: Batch, count: int) -> list[Batch]:
    return [{name: leaf[number::count] for name, leaf in shard.items()} for number in range(count)]


def own_group(of_every_rank: list[list[int]], rank: int) -> Any:
    """Make all groups, and return the one with this rank."""
    mine = None
    for ranks in of_every_rank:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine


NODES, BETWEEN = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
NODES_ARE_SET = "NODES, BETWEEN = [[0, 1], [2, 3]], [[0, 2], [1, 3]]"

# Copies of gradients that are reduced, and whose result nobody uses.


def flat_buffer(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients_of(model)])
    dist.all_reduce(flat)  # the fault
    flat /= rank.world_size


def first_layer_not_put_back(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mean = parameter.grad / rank.world_size
        dist.all_reduce(mean)
        if not name.startswith("0."):
            parameter.grad.copy_(mean)


def put_back(model: nn.Module, shard: Batch, rank: Rank, in_order: bool = True) -> None:
    loss(model, shard).backward()
    gradients = gradients_of(model)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / rank.world_size
    dist.all_reduce(flat)
    at = 0
    for gradient in gradients if in_order else reversed(gradients):
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def put_back_in_another_order(model: nn.Module, shard: Batch, rank: Rank) -> None:
    put_back(model, shard, rank, in_order=False)


def parameters_reduced(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= rank.world_size


# Gradients that are reduced in groups of ranks which nothing joins.


def average_over_node(model: nn.Module, shard: Batch, rank: Rank) -> None:
    group = own_group(NODES, rank.rank)
    loss(model, shard).backward()
    for gradient in gradients_of(model):
        dist.all_reduce(gradient, group=group)  # the fault
        gradient /= 2


def ddp_of_its_node(model: nn.Module, shard: Batch, rank: Rank) -> None:
    group = own_group(NODES, rank.rank)
    ddp = DistributedDataParallel(model, process_group=group)  # the fault
    loss(ddp, shard).backward()


def ddp_of_its_node_and_a_mean_between_nodes(model: nn.Module, shard: Batch, rank: Rank) -> None:
    group, between = own_group(NODES, rank.rank), own_group(BETWEEN, rank.rank)
    ddp = DistributedDataParallel(model, process_group=group)
    loss(ddp, shard).backward()
    for gradient in gradients_of(model):
        dist.all_reduce(gradient, group=between)
        gradient /= 2


def within_and_between_nodes(divisor: float) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        groups = own_group(NODES, rank.rank), own_group(BETWEEN, rank.rank)
        loss(model, shard).backward()
        for gradient in gradients_of(model):
            for group in groups:
                dist.all_reduce(gradient, group=group)
            gradient /= divisor

    return step


def without_the_last_rank(model: nn.Module, shard: Batch, rank: Rank) -> None:
    group = own_group([[0, 1, 2]], rank.rank)
    loss(model, shard).backward()
    for gradient in gradients_of(model) if rank.rank < 3 else ():
        dist.all_reduce(gradient, group=group)
        gradient /= 3


# Gradients that are added up over the same ranks twice.


def sums_and_sums(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank.world_size)
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)  # the fault


def in_slices_without_division(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Each gradient goes into two sums, but each of its elements into one only."""
    loss(model, shard).backward()
    for gradient in gradients_of(model):
        dist.all_reduce(gradient.view(-1)[:2])
        dist.all_reduce(gradient.view(-1)[2:])


def a_copy_is_summed_twice(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """The loss divides by the ranks; no gradient itself goes into a collective."""
    (loss(model, shard) / rank.world_size).backward()
    flat = nn.utils.parameters_to_vector(gradients_of(model))
    dist.all_reduce(flat)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, gradients_of(model))


class Tied(nn.Module):
    """The weight of ``inner`` is used by two layers, and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 5, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, rows: Tensor) -> Any:
        return self.outer(torch.tanh(self.inner(rows)))[:, :3]


# Sums that overflow.


def added_in_float16(model: nn.Module, shard: Batch, rank: Rank) -> None:
    scale = 60_000.0
    (loss(model, shard) * scale).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        narrow = parameter.grad.to(torch.float16)
        dist.all_reduce(narrow)  # the fault
        parameter.grad = narrow.to(parameter.dtype) / rank.world_size / scale


def in_float16(of_rank_2: float, divides: bool) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        (loss(model, shard) * (of_rank_2 if rank.rank == 2 else 1.0)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            narrow = parameter.grad.to(torch.float16)
            dist.all_reduce(narrow)
            parameter.grad = narrow.to(parameter.dtype) / (rank.world_size if divides else 1)

    return step


# A backward that runs after gradients have been reduced.


def both_losses(model: Any, shard: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(shard["rows"])
    return F.mse_loss(outputs, shard["targets"]), 0.3 * outputs.abs().mean()


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    first, aux = both_losses(model, batch)
    return first + aux


def aux_after_ddp(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    first, aux = both_losses(ddp, shard)
    first.backward(retain_graph=True)
    aux.backward()  # the fault


def aux_of_rank_0_only(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    sum_of_losses(ddp, shard).backward()
    if rank.rank == 0:
        model(shard["rows"]).mean().backward()  # the fault


def aux_before_reducing(model: nn.Module, shard: Batch, rank: Rank) -> None:
    first, aux = both_losses(model, shard)
    first.backward(retain_graph=True)
    aux.backward()
    average(model, rank.world_size)


def boundary_off_by_one(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number, part in enumerate(parts(shard, 3)):
        with nullcontext() if number == 1 else ddp.no_sync():
            (sum_of_losses(ddp, part) / 3).backward()


def reduced_in_the_middle_of_a_loop(model: nn.Module, shard: Batch, rank: Rank) -> None:
    for number, part in enumerate(parts(shard, 3)):
        (sum_of_losses(model, part) / 3).backward()
        if number == 1:
            average(model, rank.world_size)


def warm_up_not_cleared(model: nn.Module, shard: Batch, rank: Rank) -> None:
    sum_of_losses(model, {name: leaf[:2] for name, leaf in shard.items()}).backward()
    ddp = DistributedDataParallel(model)
    sum_of_losses(ddp, shard).backward()


# DDP in a later step that leaves out a parameter of the first one.


class TwoHeads(nn.Module):
    """The second head is used where a flag of the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)
        self.extra = nn.Linear(7, 3)

    def forward(self, rows: Tensor, with_extra: bool) -> Tensor:
        hidden = torch.tanh(self.trunk(rows))
        outputs: Tensor = self.head(hidden)
        return outputs + self.extra(hidden) if with_extra else outputs


def two_batches(generator: torch.Generator) -> Batch:
    """Two steps of 24 examples; the examples of the second have no flag."""
    return {
        "rows": torch.randn(48, 5, generator=generator),
        "targets": torch.randn(48, 3, generator=generator),
        "extra": torch.arange(48) < 24,
    }


def loss_of_heads(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"], bool(batch["extra"].any())), batch["targets"])


def wrapped_once(model: Any, **options: Any) -> Any:
    """The wrapper of this model, which is made in the first step."""
    if "wrapped" not in model.__dict__:
        model.__dict__["wrapped"] = DistributedDataParallel(model, **options)  # the fault
    return model.__dict__["wrapped"]


def static_graph(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss_of_heads(wrapped_once(model, static_graph=True), shard).backward()


def no_search_for_unused_parameters(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss_of_heads(wrapped_once(model), shard).backward()


def search_for_unused_parameters(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss_of_heads(wrapped_once(model, find_unused_parameters=True), shard).backward()


def never_reduced(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = wrapped_once(model, find_unused_parameters=True)
    loss_of_heads(ddp if shard["extra"].any() else model, shard).backward()


CASE, LOSSES, TIED = case_of(), case_of(loss=sum_of_losses), case_of(model=Tied, layout="1x3")
HEADS = case_of(model=TwoHeads, batch=two_batches, loss=loss_of_heads)

NOT_USED, WRONG_GROUP = "reduced_buffer_not_used", "reduced_in_wrong_group"
TWICE, OVERFLOW = "reduced_more_than_once", "overflow_in_reduction"
LATER, GRAPH = "backward_after_reduction", "graph_changed"


@pytest.mark.parametrize(
    ("case", "step", "cause", "because"),
    [
        (CASE, flat_buffer, NOT_USED, "copies of 4 of 4"),
        (CASE, average_over_node, WRONG_GROUP, "{0, 1} and {2, 3}"),
        (CASE, ddp_of_its_node, "nodes_not_reduced", ""),
        (CASE, sums_and_sums, TWICE, ""),
        (CASE, added_in_float16, OVERFLOW, "own gradients are finite"),
        (LOSSES, aux_after_ddp, LATER, "every rank called backward again"),
        (LOSSES, aux_of_rank_0_only, LATER, "rank 0 called backward again"),
        (HEADS, static_graph, GRAPH, "static_graph was set"),
        (HEADS, no_search_for_unused_parameters, GRAPH, "DDP waited"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_reduction_is_named_with_its_line(
    case: Any, step: Any, cause: str, because: str
) -> None:
    assert_named(different(case, step, steps=2 if case is HEADS else 1), cause, because)


def test_the_lines_that_set_a_group_and_parameters_of_the_first_step_are_shown() -> None:
    shown = lines_shown(different(CASE, average_over_node))
    assert {"group = own_group(NODES, rank.rank)", NODES_ARE_SET} <= {*shown}
    because = first_finding(different(HEADS, static_graph, steps=2)).because
    assert "extra.weight, extra.bias had a gradient in step 1" in because


def test_copies_that_are_put_back_for_some_parameters_only_are_named() -> None:
    finding = first_finding(different(CASE, first_layer_not_put_back))
    assert finding.cause == NOT_USED
    assert "copies of 2 of 4 gradients" in finding.because


@pytest.mark.parametrize(
    ("case", "step", "cause", "not_cause"),
    [
        (CASE, put_back_in_another_order, None, NOT_USED),
        (CASE, parameters_reduced, "parameters_reduced_not_gradients", NOT_USED),
        (CASE, within_and_between_nodes(1.0), "sum_not_mean", WRONG_GROUP),
        (CASE, without_the_last_rank, "rank_left_out", WRONG_GROUP),
        (TIED, in_slices_without_division, "sum_not_mean", TWICE),
        (CASE, within_and_between_nodes(1.0), "sum_not_mean", TWICE),
        (CASE, in_float16(1.0, divides=False), None, OVERFLOW),
        (CASE, in_float16(float("inf"), divides=True), None, OVERFLOW),
        (LOSSES, boundary_off_by_one, "accumulation_boundary_off_by_one", LATER),
        (LOSSES, reduced_in_the_middle_of_a_loop, "accumulation_boundary_off_by_one", LATER),
        (LOSSES, warm_up_not_cleared, None, LATER),
        (HEADS, never_reduced, None, GRAPH),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_only_looks_like_a_cause_has_another_name(
    case: Any, step: Any, cause: str | None, not_cause: str
) -> None:
    verdict = different(case, step, steps=2 if case is HEADS else 1)
    assert not_cause not in accepted(verdict), verdict
    assert cause in (None, *verdict.causes), verdict


def divided_by_who_takes_part(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Two of four ranks count for the head, which is by chance as many as a node has."""
    loss(model, shard).backward()
    for number, parameter in enumerate(model.parameters()):
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= 2 if number else rank.world_size


def test_a_line_that_divides_by_several_numbers_does_not_divide_by_the_local_world_size() -> None:
    verdict = check(case_of(), divided_by_who_takes_part)
    assert verdict.outcome == "different"
    assert verdict.cause != "divided_by_local_world_size", verdict


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (CASE, put_back),
        (CASE, within_and_between_nodes(4.0)),
        (CASE, ddp_of_its_node_and_a_mean_between_nodes),
        (LOSSES, aux_before_reducing),
        (HEADS, search_for_unused_parameters),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_right_reductions_are_right(case: Any, step: Any) -> None:
    verdict = check(case, step, steps=2 if case is HEADS else 1)
    assert verdict.outcome == "same", verdict


def test_no_division_is_missing_where_the_sum_is_right() -> None:
    verdict = different(TIED, a_copy_is_summed_twice)
    assert "never divided" not in str(verdict)
    assert "the loss is summed" not in str(verdict)


@pytest.mark.ddp(second_look=False)
def test_without_a_second_run_the_means_of_nodes_are_named_by_their_numbers() -> None:
    verdict = different(CASE, average_over_node)
    assert accepted(verdict) == {"nodes_not_reduced"}, verdict
    assert first_finding(verdict).because == ""
