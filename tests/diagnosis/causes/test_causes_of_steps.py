"""Clipping, orders of examples, statistics and windows of a step have names of their own."""

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
from tests.package.pointed_at import faulty_lines

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


CASE, OWN = case_of(), case_of(shards="own")
BY_PARAMETER = "clipped_per_parameter"
APART, STATISTIC = "ranks_shuffle_apart", "statistic_not_additive"
FULL = "last_window_divided_by_full"


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
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_step_is_named_with_its_line(
    case: Any, step: Any, cause: str, because: str
) -> None:
    assert_named(different(case, step), cause, because)


def test_the_numbers_of_a_clipping_and_of_a_window_are_told() -> None:
    of_clipping = first_finding(different(CASE, scaled("steps"))).detail
    assert of_clipping.endswith("clipping to 1 limited the real norm to 1.5e-05")
    of_window = first_finding(different(CASE, loss_divided_by_full_window)).detail
    assert of_window == "3 micro-batches, divided by 4"


@pytest.mark.parametrize(
    ("case", "of_case", "fix"),
    [
        (case_of(loss=of_labels, batch=with_few_labels), of_labels, "divide the summed loss by"),
        (case_of(loss=mean_of_valid), mean_of_valid, "another gradient, too: check again"),
        (CASE, loss, "do not multiply the loss by 4: DDP averages over the 4 ranks by itself."),
    ],
)
def test_the_fix_of_a_factor_says_whether_it_is_enough(case: Any, of_case: Any, fix: str) -> None:
    finding = first_finding(different(case, times_ranks(of_case)))
    assert finding.cause == "sum_not_mean"
    assert fix in finding.fix
    assert ("check again" in finding.fix) == ("check again" in fix)


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
    ("case", "step", "cause"),
    [
        (OWN, padded, APART),
        (case_of(loss=mean_of_valid), under_ddp(mean_of_valid), STATISTIC),
        (case_of(loss=of_two_means), under_ddp(of_two_means), STATISTIC),
        (case_of(loss=noisy), not_averaged(noisy), STATISTIC),
        (OWN, half_of_the_layers, "divided_by_local_world_size"),
        (
            case_of(loss=gated, shards="own"),
            units_of_each_rank,
            "reduced_before_backward_finished",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_only_looks_like_a_cause_does_not_have_it(case: Any, step: Any, cause: str) -> None:
    verdict = different(case, step)
    assert cause not in accepted(verdict), verdict


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (OWN, one_permutation),
        (case_of(loss=root), mean_inside_the_root),
        (case_of(loss=noisy), under_ddp(noisy)),
        (CASE, window_divided_by(3)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_right_steps_are_right(case: Any, step: Any) -> None:
    verdict = check(case, step)
    assert verdict.outcome == "same", verdict


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
