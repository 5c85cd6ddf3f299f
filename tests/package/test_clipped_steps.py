"""A step that clips the right gradients in the end is right: they are compared as they were before.

A wrong factor, or gradients that were never reduced, are seen all the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from ddp_equivalence import Rank, Verdict, check
from tests.package.own_cases import loss, own_case

MAX_NORM = 0.1

Shard = dict[str, Tensor]


def backward(model: nn.Module, shard: Shard) -> nn.Module:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    return ddp


def by_norm(model: nn.Module, shard: Shard, rank: Rank) -> None:
    clip_grad_norm_(backward(model, shard).parameters(), MAX_NORM)


def by_largest_element(model: nn.Module, shard: Shard, rank: Rank) -> None:
    backward(model, shard)
    clip_grad_norm_(model.parameters(), max_norm=MAX_NORM, norm_type=float("inf"))


def by_norm_in_two_calls(model: nn.Module, shard: Shard, rank: Rank) -> None:
    backward(model, shard)
    norm = get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)


def by_value(model: nn.Module, shard: Shard, rank: Rank) -> None:
    backward(model, shard)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def accumulated(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    halves = [{name: leaf[part::2] for name, leaf in shard.items()} for part in (0, 1)]
    with ddp.no_sync():
        (loss(ddp, halves[0]) / 2).backward()
    (loss(ddp, halves[1]) / 2).backward()
    clip_grad_norm_(ddp.parameters(), MAX_NORM)


def returned(model: nn.Module, shard: Shard, rank: Rank) -> dict[str, Tensor | None]:
    own = copy.deepcopy(model)
    by_norm(own, shard, rank)
    return {name: one.grad for name, one in own.named_parameters()}


def unscaled(model: nn.Module, shard: Shard, rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ddp = DistributedDataParallel(model)
    scaler.scale(loss(ddp, shard)).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    clip_grad_norm_(model.parameters(), MAX_NORM)


RIGHT = (
    by_norm,
    by_largest_element,
    by_norm_in_two_calls,
    by_value,
    accumulated,
    returned,
    unscaled,
)


def summed(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    clip_grad_norm_(model.parameters(), MAX_NORM)


def not_reduced(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)


def on_one_rank(model: nn.Module, shard: Shard, rank: Rank) -> None:
    backward(model, shard)
    if rank.rank == 0:
        clip_grad_norm_(model.parameters(), MAX_NORM)


def to_a_norm_of_its_own(model: nn.Module, shard: Shard, rank: Rank) -> None:
    backward(model, shard)
    clip_grad_norm_(model.parameters(), MAX_NORM * (rank.rank + 1))


def changed_afterwards(model: nn.Module, shard: Shard, rank: Rank) -> None:
    by_norm(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 3


def a_part(model: nn.Module, shard: Shard, rank: Rank) -> None:
    backward(model, shard)
    clip_grad_norm_(list(model.parameters())[:1], MAX_NORM)


WRONG = {
    summed: "sum_not_mean",
    not_reduced: "no_all_reduce",
    on_one_rank: None,
    to_a_norm_of_its_own: None,
    changed_afterwards: None,
    a_part: None,
}


def words(verdict: Verdict) -> str:
    """The report without its line ends."""
    return " ".join(str(verdict).split())


@pytest.mark.parametrize("step", RIGHT)
def test_clipping_right_gradients_is_right(step: Any) -> None:
    verdict = check(own_case(layout="1x2"), step)
    assert verdict.outcome == "same", verdict
    assert "before the step clipped" in words(verdict)


@pytest.mark.parametrize("step", WRONG)
def test_clipping_hides_no_mistake(step: Any) -> None:
    verdict = check(own_case(layout="1x2"), step)
    assert (verdict.outcome, verdict.cause) == ("different", WRONG[step]), verdict


def test_several_steps_of_the_suite_start_from_what_was_not_clipped() -> None:
    assert check(own_case(layout="1x2"), by_norm, steps=3).outcome == "same"


class Trains:
    """Clips in every step to ``norm``, or else each element to ``value``."""

    norm, value, divisor = MAX_NORM, 0.0, 1.0

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self, shard: Shard) -> None:
        self.optimizer.zero_grad()
        (loss(self.ddp, shard) / self.divisor).backward()
        if self.value:
            torch.nn.utils.clip_grad_value_(self.ddp.parameters(), self.value)
        else:
            clip_grad_norm_(self.ddp.parameters(), self.norm)
        self.optimizer.step()


class TrainsByValue(Trains):
    value = 0.01


class TrainsHalved(Trains):
    """Clipped to the same norm, so that the weights are right, and the gradients are not."""

    divisor = 2.0


def clip_by_value(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, TrainsByValue.value)


def test_the_big_batch_is_clipped_as_the_case_says() -> None:
    options: Any = {"compare": "update", "steps": 2, "clip": clip_by_value}
    assert check(own_case(), TrainsByValue, **options).outcome == "same"


@pytest.mark.parametrize("trainer", [Trains, TrainsByValue])
def test_the_big_batch_is_clipped_as_the_trainer_clips(trainer: Any) -> None:
    verdict = check(own_case(layout="1x2"), trainer, compare="update", steps=2)
    assert verdict.outcome == "same", verdict
    assert "the gradients of the big batch are clipped" in words(verdict)


def test_a_trainer_whose_gradients_are_wrong_before_it_clips_is_different() -> None:
    verdict = check(own_case(layout="1x2"), TrainsHalved, compare="update", steps=2)
    assert verdict.outcome == "different", verdict
    assert verdict.wrong_step is not None
    assert verdict.wrong_step.differs == "gradients"
