"""A step that is right on one rank shows the line at which more ranks part from it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.where import divergence
from tests.diagnosis.where.faulty import CASE, average, distance, loss, unnamed
from tests.diagnosis.where.test_kinds_of_differences import maximum_instead_of_sum


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


def masks_that_do_not_cancel(model: Any, shard: Any, rank: Any) -> None:
    """What ranks add for each other is to vanish in the sum, and their seeds differ."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        for other in set(range(rank.world_size)) - {rank.rank}:
            seed = 100 * rank.rank + other
            drawn = torch.Generator().manual_seed(seed)
            mask = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64)  # fault
            parameter.grad += mask if other > rank.rank else -mask
    average(model)


def packs_fewer_gradients_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    """Rank 1 leaves out a gradient, so that its others lie where those of other parameters do."""
    loss(model, shard).backward()
    parameters = list(model.parameters())
    packed, offset = torch.zeros(sum(map(torch.numel, parameters)), dtype=torch.float64), 0
    for number, parameter in enumerate(parameters):
        if rank.rank == 1 and number == 1:
            continue
        packed[offset : offset + parameter.numel()].copy_(parameter.grad.flatten())  # fault
        offset += parameter.numel()
    dist.all_reduce(packed)
    packed.div_(rank.world_size)
    offset = 0
    for parameter in parameters:
        part = packed[offset : offset + parameter.numel()]
        parameter.grad = part.view_as(parameter).clone()
        offset += parameter.numel()


class Config:
    width: int = 6


def tables(drawn: random.Random, config: Config) -> tuple[Tensor, Tensor]:
    shift = torch.tensor([drawn.random() for _ in range(config.width)])
    scale = torch.tensor([1 + drawn.random() for _ in range(config.width)])
    return shift, scale


def own_random_table(model: Any, shard: Any, rank: Any) -> None:
    """Numbers of Python that differ between ranks become two tensors; the seed is at fault."""
    drawn = random.Random(rank.rank)  # fault
    config = Config()
    targets = shard["targets"]
    rows = shard["rows"]
    shift, scale = tables(drawn, config)
    nn.functional.mse_loss(model(rows * scale + shift), targets).backward()
    average(model)


def with_table(model: Any, batch: dict[str, Tensor]) -> Any:
    shift, scale = tables(random.Random(0), Config())
    return nn.functional.mse_loss(model(batch["rows"] * scale + shift), batch["targets"])


GAINS = replace(CASE, batch=weighted_rows, loss=relative_gain_loss)
SPREAD = replace(GAINS, loss=by_spread)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (GAINS, largest_of_the_rank),
        (CASE, maximum_instead_of_sum),
        (SPREAD, loops_over_what_the_rank_has),
        (replace(GAINS, shards="5+3+6+2"), largest_of_the_rank),
        (CASE, masks_that_do_not_cancel),
        (CASE, packs_fewer_gradients_on_one_rank),
        (replace(CASE, loss=with_table), own_random_table),
    ],
    ids=lambda value: getattr(value, "__name__", str(getattr(value, "shards", ""))),
)
def test_the_line_at_which_the_ranks_part_is_marked(case: Case, step: Any) -> None:
    where = unnamed(case, step)
    assert where.is_right_alone
    assert where.lines[0].is_fault == (step is not own_random_table)  # whose line the case has, too
    assert distance(where, step) <= 1


@pytest.mark.parametrize("step", [wrong_on_any_number_of_ranks, sends_to_a_neighbour])
def test_a_step_that_is_wrong_on_one_rank_too_is_said_to_be(step: Any) -> None:
    where = unnamed(replace(CASE, layout="1x2"), step)
    assert where.is_right_alone is (step is sends_to_a_neighbour)


@pytest.mark.parametrize("step", [needs_two_ranks, noisy])
def test_nothing_is_said_of_one_rank_where_it_shows_nothing(step: Any) -> None:
    assert unnamed(CASE, step).is_right_alone is None


@pytest.mark.parametrize(
    ("step", "outcome", "times"),
    [("ddp_mean", "same", 0), (wrong_on_any_number_of_ranks, "different", 1)],
)
def test_only_a_difference_without_a_cause_runs_on_one_rank(
    step: Any, outcome: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    monkeypatch.setattr(divergence, "operations_beside_one_rank", lambda *_: runs.append(1))
    assert check(CASE, step).outcome == outcome
    assert len(runs) == times


def test_a_difference_with_a_cause_does_not_run_on_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    monkeypatch.setattr(divergence, "operations_beside_one_rank", lambda *_: runs.append(1))
    verdict = check(CASE, "manual_all_reduce_sum")
    assert verdict.outcome == "different"
    assert not runs
