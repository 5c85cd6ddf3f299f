"""Steps and reductions that are wrong have a name and the faulty line; others only look so."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DistributedSampler

from ddp_equivalence import Rank, check
from ddp_equivalence.diagnosis import shares
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from tests.diagnosis.causes.named import accepted, assert_named, case_of, different, first_finding
from tests.diagnosis.names.small_case import average
from tests.diagnosis.where.test_exchanges import Summed
from tests.package.own_cases import loss
from tests.package.pointed_at import faulty_lines, lines_shown

pytestmark = pytest.mark.self_check

Batch = dict[str, Tensor]

MAX_NORM = 0.1

# Gradients that are clipped in parts, or while they are scaled.


def each_parameter(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        clip_grad_norm_(parameter, MAX_NORM)  # the fault


def each_layer_before_reducing(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for layer in model.children():
        clip_grad_norm_(list(layer.parameters()), MAX_NORM)  # the fault
    average(model, rank.world_size)


def each_micro_batch(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(3):
        micro_batch = {name: leaf[number::3] for name, leaf in shard.items()}
        with nullcontext() if number == 2 else ddp.no_sync():
            (loss(ddp, micro_batch) / 3).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)  # the fault


def before_reducing(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)  # the fault
    average(model, rank.world_size)


def norms_that_nothing_exceeds(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 1e6)
        dist.all_reduce(parameter.grad)


def scaled(ends: str = "", max_norm: float = 1.0) -> Any:
    """A step with a loss scale. ``ends``: what stands behind the clipping."""

    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        ddp = DistributedDataParallel(model)
        scaler.scale(loss(ddp, shard)).backward()
        clip_grad_norm_(model.parameters(), max_norm)  # the fault
        if ends == "unscales":
            scaler.unscale_(optimizer)
        elif ends == "steps":
            scaler.step(optimizer)

    return step


# Ranks that take their examples from orders of their own.


def train_on(model: nn.Module, batch: Batch, chosen: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, {name: leaf[chosen] for name, leaf in batch.items()}).backward()


def seeded_by_rank(model: nn.Module, batch: Batch, rank: Rank) -> None:
    torch.manual_seed(5 + rank.rank)  # the fault
    order = torch.randperm(len(batch["rows"]))
    own = len(order) // rank.world_size
    train_on(model, batch, order[rank.rank * own : (rank.rank + 1) * own])


def shuffled_list(model: nn.Module, batch: Batch, rank: Rank) -> None:
    order = list(range(len(batch["rows"])))
    random.Random(rank.rank).shuffle(order)  # the fault
    train_on(model, batch, order[rank.rank :: rank.world_size])


def one_order(batch: Batch) -> Tensor:
    return torch.randperm(len(batch["rows"]), generator=torch.Generator().manual_seed(3))


def one_permutation(model: nn.Module, batch: Batch, rank: Rank) -> None:
    train_on(model, batch, one_order(batch)[rank.rank :: rank.world_size])


def overlapping_slices(model: nn.Module, batch: Batch, rank: Rank) -> None:
    order = one_order(batch)
    begin = max(0, 6 * rank.rank - 1)  # the fault
    train_on(model, batch, order[begin : begin + 6])


def padded(model: nn.Module, batch: Batch, rank: Rank) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(
        cast(Any, range(22)), rank.world_size, rank.rank, shuffle=True, seed=4
    )
    train_on(model, batch, list(sampler))


def padded_to_batches_of_four(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Deals batches of 4 to the ranks, and fills up with the first examples."""
    count = len(batch["rows"])
    indices = torch.arange(-(-count // (4 * rank.world_size)) * 4 * rank.world_size) % count
    train_on(model, batch, indices.view(-1, 4)[rank.rank :: rank.world_size].flatten())


# Losses that are another statistic of the batch than a mean.


def squares(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch["rows"])
    return (outputs - batch["targets"]).square()


def root(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).mean().sqrt()


def logarithm(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).mean().log()


def mean_of_valid(model: nn.Module, batch: Batch) -> Tensor:
    valid = (batch["targets"] > 0).to(batch["targets"].dtype)
    return (squares(model, batch) * valid).sum() / valid.sum()


def of_two_means(model: nn.Module, batch: Batch) -> Tensor:
    error = squares(model, batch)
    above, below = batch["targets"] > 0, batch["rows"][:, :3] > 0.5
    return error[above].mean() + error[below].mean()


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["rows"])
    return F.mse_loss(outputs + torch.randn_like(outputs), batch["targets"])


def under_ddp(of_case: Any) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        of_case(ddp, shard).backward()  # the fault

    return step


def not_averaged(of_case: Any) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        of_case(model, shard).backward()

    return step


def mean_inside_the_root(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    mean = squares(ddp, shard).mean()
    of_all = mean.detach().clone()
    dist.all_reduce(of_all)
    of_all /= rank.world_size
    (mean / (2 * of_all.sqrt())).backward()


def times_ranks(of_case: Any) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        (of_case(ddp, shard) * rank.world_size).backward()

    return step


def with_few_labels(generator: torch.Generator) -> Batch:
    """Labels of which the later examples have fewer."""
    labels = torch.randint(0, 3, (24,), generator=generator)
    labels[torch.arange(24) % 12 > 8 - torch.arange(24) // 4] = -100
    return {"rows": torch.randn(24, 5, generator=generator), "labels": labels}


def of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["rows"]), batch["labels"], ignore_index=-100)


# Ranks that hold other parts of the model, in which nothing is divided wrongly or reduced early.


def half_of_the_layers(model: Any, batch: Batch, rank: Rank) -> None:
    """Each rank of a node has a layer, each node half of the rows; one weight has a penalty."""
    rows = {name: leaf.chunk(rank.nodes)[rank.node] for name, leaf in batch.items()}
    value = loss(model, rows) + sum(one.sum() for one in model[0].parameters())
    value.backward(inputs=list(model[2 * rank.local_rank].parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.nodes


class Added(torch.autograd.Function):
    """Adds up the parts of all ranks, and hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def gated(model: Any, batch: Batch, units: slice = slice(None), sends: Any = None) -> Tensor:
    """A gate of units, each times its value: of all, or of those that a rank computes."""
    hidden = torch.tanh(model[0](batch["rows"]))
    shared = hidden if sends is None else sends(hidden)
    gate = F.linear(shared, model[2].weight[units]).sigmoid()
    part = (gate * F.linear(hidden, model[2].weight[units])).sum(1)
    total = part if sends is None else Added.apply(part)  # type: ignore[no-untyped-call]
    return (total - batch["targets"][:, 0]).square().mean()


def units_of_each_rank(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """The values of a gate are made of what is not summed on the way back."""
    units = slice(rank, rank + 1)  # of three units, so that the last rank has none
    gated(model, batch, units, Summed.apply).backward()
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name == "2.weight":
            dist.all_reduce(parameter.grad)


# Accumulation windows that are divided by the length of a longer one.

FULL_WINDOW = 4


def window(shard: Batch, size: int = 2) -> list[Batch]:
    """The micro-batches that are left at the end of an epoch: three of two examples."""
    return [
        {name: leaf[first : first + size] for name, leaf in shard.items()}
        for first in range(0, len(shard["rows"]), size)
    ]


def loss_divided_by_full_window(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number, micro_batch in enumerate(window(shard)):
        with nullcontext() if number == 2 else ddp.no_sync():
            (loss(ddp, micro_batch) / FULL_WINDOW).backward()  # the fault


def window_divided_by(number: float, by_ranks_too: bool = False) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        for micro_batch in window(shard):
            (loss(model, micro_batch) / number).backward()
        average(model, rank.world_size ** (2 if by_ranks_too else 1))

    return step


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


CASE, OWN, LOSSES = case_of(), case_of(shards="own"), case_of(loss=sum_of_losses)
TIED, GATED = case_of(model=Tied, layout="1x3"), case_of(loss=gated, shards="own")
HEADS = case_of(model=TwoHeads, batch=two_batches, loss=loss_of_heads)

BY_PARAMETER, FULL = "clipped_per_parameter", "last_window_divided_by_full"
APART, STATISTIC = "ranks_shuffle_apart", "statistic_not_additive"
NOT_USED, WRONG_GROUP = "reduced_buffer_not_used", "reduced_in_wrong_group"
TWICE, OVERFLOW = "reduced_more_than_once", "overflow_in_reduction"
LATER, GRAPH = "backward_after_reduction", "graph_changed"


def steps_of(case: Any) -> int:
    return 2 if case is HEADS else 1


@pytest.mark.parametrize(
    ("case", "step", "cause", "because"),
    [
        (CASE, each_parameter, BY_PARAMETER, ""),
        (CASE, each_layer_before_reducing, BY_PARAMETER, ""),
        (CASE, each_micro_batch, "clipped_per_micro_batch", "called 3 times"),
        (CASE, scaled("unscales"), "clipped_while_scaled", ""),
        (CASE, scaled("steps"), "clipped_while_scaled", ""),
        (OWN, seeded_by_rank, APART, ""),
        (case_of(loss=root), under_ddp(root), STATISTIC, "the square of the loss is a mean"),
        (case_of(loss=logarithm), under_ddp(logarithm), STATISTIC, "the exponential of the"),
        (CASE, loss_divided_by_full_window, FULL, ""),
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
def test_a_wrong_step_is_named_with_its_line(
    case: Any, step: Any, cause: str, because: str
) -> None:
    assert_named(different(case, step, steps=steps_of(case)), cause, because)


def test_the_numbers_of_a_clipping_and_of_a_window_are_told() -> None:
    of_clipping = first_finding(different(CASE, scaled("steps"))).detail
    assert of_clipping.endswith("clipping to 1 limited the real norm to 1.5e-05")
    of_window = first_finding(different(CASE, loss_divided_by_full_window)).detail
    assert of_window == "3 micro-batches, divided by 4"


LABELS = case_of(loss=of_labels, batch=with_few_labels)


@pytest.mark.parametrize(
    ("case", "of_case", "cause", "fix"),
    [
        (LABELS, of_labels, "token_counts_weighted_equally", "divide the summed loss by"),
        (case_of(loss=root), root, "sum_not_mean", "another gradient, too: check again"),
        (CASE, loss, "sum_not_mean", "do not multiply the loss by 4: DDP averages over the 4"),
    ],
)
def test_the_fix_of_a_factor_says_whether_it_is_enough(
    case: Any, of_case: Any, cause: str, fix: str
) -> None:
    """Where means divide by counts of their own, the factor goes with the count of all ranks."""
    finding = first_finding(different(case, times_ranks(of_case)))
    assert finding.cause == cause
    assert fix in finding.fix
    assert ("check again" in finding.fix) == ("check again" in fix)


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
    ("case", "step", "causes"),
    [
        (CASE, scaled(max_norm=1.0), {"gradient_scaled_not_unscaled"}),
        (CASE, scaled(max_norm=1e9), {"gradient_scaled_not_unscaled"}),
        (CASE, before_reducing, {"clipped_before_reduce"}),
        (CASE, norms_that_nothing_exceeds, {"sum_not_mean"}),
        (OWN, shuffled_list, {APART}),
        (OWN, overlapping_slices, {"shares_overlap"}),
        (OWN, padded_to_batches_of_four, {"sampler_padding_counted"}),
        (case_of(loss=root), not_averaged(root), {"no_all_reduce"}),
        (CASE, window_divided_by(1), {"accumulation_not_divided"}),
        (CASE, window_divided_by(3, by_ranks_too=True), {"averaged_twice"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_steps_that_are_alike_are_told_apart(case: Any, step: Any, causes: set[str]) -> None:
    verdict = different(case, step)
    assert accepted(verdict) == causes, verdict


@pytest.mark.parametrize(
    ("case", "step", "cause", "not_cause"),
    [
        (OWN, padded, None, APART),
        (case_of(loss=mean_of_valid), under_ddp(mean_of_valid), None, STATISTIC),
        (case_of(loss=of_two_means), under_ddp(of_two_means), None, STATISTIC),
        (case_of(loss=noisy), not_averaged(noisy), None, STATISTIC),
        (OWN, half_of_the_layers, None, "divided_by_local_world_size"),
        (GATED, units_of_each_rank, None, "reduced_before_backward_finished"),
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
def test_what_only_looks_like_a_cause_has_another_name_or_none(
    case: Any, step: Any, cause: str | None, not_cause: str
) -> None:
    verdict = different(case, step, steps=steps_of(case))
    assert not_cause not in accepted(verdict), verdict
    assert cause in (None, *verdict.causes), verdict


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (OWN, one_permutation),
        (case_of(loss=root), mean_inside_the_root),
        (case_of(loss=noisy), under_ddp(noisy)),
        (CASE, window_divided_by(3)),
        (CASE, put_back),
        (CASE, within_and_between_nodes(4.0)),
        (CASE, ddp_of_its_node_and_a_mean_between_nodes),
        (LOSSES, aux_before_reducing),
        (HEADS, search_for_unused_parameters),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_right_steps_are_right(case: Any, step: Any) -> None:
    verdict = check(case, step, steps=steps_of(case))
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


def test_the_line_of_slices_that_overlap_and_of_a_shuffle_is_marked() -> None:
    assert "begin = max(0, 6 * rank.rank - 1)  # the fault" in faulty_lines(
        different(OWN, overlapping_slices)
    )
    first = faulty_lines(different(OWN, shuffled_list))[0]
    assert first == "random.Random(rank.rank).shuffle(order)  # the fault"


@pytest.fixture
def few_elements_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 0)
    monkeypatch.setattr(shares, "MAX_SELECTED", 120)


@pytest.mark.usefixtures("few_elements_are_kept")
@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (each_layer_before_reducing, BY_PARAMETER),
        (each_micro_batch, "clipped_per_micro_batch"),
        (scaled("unscales"), "clipped_while_scaled"),
        (before_reducing, "clipped_before_reduce"),
    ],
)
def test_clipping_is_named_also_where_only_some_elements_are_kept(step: Any, cause: str) -> None:
    """Then the norm is the one that torch has found on the ranks."""
    verdict = different(CASE, step)
    assert verdict.view is not None
    assert not verdict.view.parameters.sample.is_whole
    assert_named(verdict, cause)


@pytest.mark.usefixtures("few_elements_are_kept")
def test_a_cause_that_was_not_seen_to_happen_makes_none_fail() -> None:
    """Such as in the further steps of a script, whose ranks are watched in one step only."""
    view = different(CASE, before_reducing).view
    assert view is not None
    nothing_seen = replace(view, observed=replace(view.observed, by_rank={}))
    for hypothesis in HYPOTHESES:
        hypothesis.predict(nothing_seen)


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
