"""Steps in which each rank has the optimizer of its own parameters, and sends them on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Rank, check
from ddp_equivalence.report.verdict import Verdict
from tests.package.own_cases import loss, own_case
from tests.package.own_trainers import adamw

LIMIT, LR = 0.05, 0.1
Rows = dict[str, Tensor]


class Owned:
    """Every second parameter is reduced to one rank, clipped and stepped there."""

    norm_of_all = True
    left_out = 0

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.rank = model, rank
        self.every = list(model.parameters())
        stepped = self.every[: len(self.every) - self.left_out]
        self.mine = [one for n, one in enumerate(stepped) if self.owner(n) == rank.rank]
        self.optimizer = adamw(self.mine)

    def owner(self, number: int) -> int:
        return number % self.rank.world_size

    def norm(self) -> Tensor:
        squares = [one.grad.square().sum() for one in self.mine if one.grad is not None]
        total = torch.stack(squares).sum()
        if self.norm_of_all:
            dist.all_reduce(total)
        return total.sqrt()

    def __call__(self, shard: Rows) -> None:
        loss(self.model, shard).backward()
        for number, parameter in enumerate(self.every):
            assert parameter.grad is not None
            parameter.grad /= self.rank.world_size
            dist.reduce(parameter.grad, dst=self.owner(number))
        factor = (LIMIT / (self.norm() + 1e-6)).clamp(max=1.0)
        for parameter in self.mine:
            assert parameter.grad is not None
            parameter.grad *= factor
        self.optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(self.every):
                dist.broadcast(parameter, src=self.owner(number))
                parameter.grad = None


class ClipsToItsOwnNorm(Owned):
    norm_of_all = False


class LeavesOneOut(Owned):
    left_out = 1


class Sliced:
    """Steps with a slice of all parameters laid end to end: no optimizer has their .grad."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.rank = model, rank
        vector = parameters_to_vector(model.parameters()).detach()
        self.slice = nn.Parameter(self.own(vector))
        self.optimizer = momentum([self.slice])

    def own(self, vector: Tensor) -> Tensor:
        missing = -len(vector) % self.rank.world_size
        return functional.pad(vector, (0, missing)).chunk(self.rank.world_size)[self.rank.rank]

    def __call__(self, shard: Rows) -> None:
        self.model.zero_grad()
        loss(self.model, shard).backward()
        flat = torch.cat(
            [one.grad.flatten() for one in self.model.parameters() if one.grad is not None]
        )
        dist.all_reduce(flat)
        self.slice.grad = self.own(flat / self.rank.world_size).clone()
        squared = self.slice.grad.square().sum()
        if self.norm_of_all:
            dist.all_reduce(squared)
        norm = squared.sqrt()
        self.slice.grad *= (LIMIT / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step()
        slices = [torch.empty_like(self.slice) for _ in range(self.rank.world_size)]
        dist.all_gather(slices, self.slice.detach())
        vector_to_parameters(torch.cat(slices)[: len(flat)], self.model.parameters())

    norm_of_all = True


class ClipsItsSlice(Sliced):
    norm_of_all = False


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


@pytest.mark.parametrize(("steps", "layout"), [(1, "1x4"), (2, "1x2")])
def test_gradients_that_no_optimizer_steps_with_are_not_believed(steps: int, layout: str) -> None:
    options: Any = {"compare": "update", "optimizer": momentum, "clip": LIMIT, "steps": steps}
    made = own_case(layout=layout)  # four ranks fill up the last slice with zeros
    assert check(made, Sliced, **options).outcome == "same"
    verdict = check(made, ClipsItsSlice, **options)
    text = " ".join(str(verdict).split())
    assert verdict.causes == ()
    assert re.search(r"> test_owned_parameters.py:\d+ norm = squared.sqrt\(\) sqrt: ", text), text
    assert text.count("> test_owned_parameters.py") == 1  # all else follows from it


def judged(step: Any) -> Verdict:
    return check(own_case(), step, compare="update", optimizer=adamw, clip=LIMIT)


def test_what_other_ranks_step_is_no_difference() -> None:
    assert judged(Owned).outcome == "same"


def test_a_norm_of_what_a_rank_owns_is_pointed_at_beside_a_reduction_to_one_rank() -> None:
    verdict = judged(ClipsToItsOwnNorm)
    text = " ".join(str(verdict).split())
    assert verdict.outcome == "different"
    assert "missing" not in text
    assert re.search(r"> test_owned_parameters.py:\d+ return total.sqrt\(\) sqrt: ", text)
    where = verdict.localisation.whereabouts
    assert where is not None
    assert "What goes into it are sums or means of each rank's own part" in where.sentence


def test_a_parameter_that_no_optimizer_steps_is_named() -> None:
    verdict = judged(LeavesOneOut)
    text = " ".join(str(verdict).split())
    assert "no optimizer steps 2.bias" in text
    assert "rank 0:" not in text


@pytest.mark.parametrize(
    ("step", "outcome"), [(ClipsToItsOwnNorm, "same"), (LeavesOneOut, "different")]
)
def test_on_one_rank_a_norm_of_what_it_owns_is_that_of_all(step: Any, outcome: str) -> None:
    one_rank = check(own_case(layout="1x1"), step, compare="update", optimizer=adamw, clip=LIMIT)
    assert one_rank.outcome == outcome
