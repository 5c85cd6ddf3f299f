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
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.report.verdict import Verdict
from tests.package.own_cases import loss, own_case
from tests.package.own_trainers import adamw

LIMIT, LR = 0.05, 0.1
Rows = dict[str, Tensor]


class Owned:
    """Every second parameter is reduced to one rank, clipped and stepped there."""

    norm_of_all = True
    left_out = 0
    clears = True

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.rank = model, rank
        self.every = list(model.parameters())
        stepped = self.every[: len(self.every) - self.left_out]
        self.mine = [one for n, one in enumerate(stepped) if self.owner(n) == rank.rank]
        self.optimizer = adamw(self.mine)

    def owner(self, number: int) -> int:
        return number % self.rank.world_size

    def reduce(self, number: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad /= self.rank.world_size
        dist.reduce(parameter.grad, dst=self.owner(number))

    def norm(self) -> Tensor:
        squares = [one.grad.square().sum() for one in self.mine if one.grad is not None]
        total = torch.stack(squares).sum()
        if self.norm_of_all:
            dist.all_reduce(total)
        return total.sqrt()

    def __call__(self, shard: Rows) -> None:
        loss(self.model, shard).backward()
        for number, parameter in enumerate(self.every):
            self.reduce(number, parameter)
        factor = (LIMIT / (self.norm() + 1e-6)).clamp(max=1.0)
        for parameter in self.mine:
            assert parameter.grad is not None
            parameter.grad *= factor
        self.optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(self.every):
                dist.broadcast(parameter, src=self.owner(number))
                parameter.grad = None if self.clears else parameter.grad


class ClipsToItsOwnNorm(Owned):
    norm_of_all = False


class ClipsAndKeepsGradients(ClipsToItsOwnNorm):
    clears = False


class DividesLater(ClipsToItsOwnNorm):
    """The sum is divided where it has arrived, and the others keep nothing."""

    def reduce(self, number: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        dist.reduce(parameter.grad, dst=self.owner(number))
        if self.owner(number) == self.rank.rank:
            parameter.grad /= self.rank.world_size
        else:
            parameter.grad = None


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
        flat = self.reduced()
        self.slice.grad = self.own(flat / self.rank.world_size).clone()
        squared = self.slice.grad.square().sum()
        if self.norm_of_all:
            dist.all_reduce(squared)
        norm = squared.sqrt()
        self.slice.grad *= (self.limit / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step()
        slices = [torch.empty_like(self.slice) for _ in range(self.rank.world_size)]
        dist.all_gather(slices, self.slice.detach())
        vector_to_parameters(torch.cat(slices)[: len(flat)], self.model.parameters())

    def reduced(self) -> Tensor:
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat)
        return flat

    norm_of_all = True
    limit = LIMIT


class ClipsItsSlice(Sliced):
    norm_of_all = False


class SumsInPlace(ClipsItsSlice):
    """Its .grad is the sum of the ranks' gradients: the mean is taken where they are sliced."""

    def reduced(self) -> Tensor:
        for one in self.model.parameters():
            dist.all_reduce(one.grad)
        return torch.cat(
            [one.grad.flatten() for one in self.model.parameters() if one.grad is not None]
        )


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


class AveragesInPlace(SumsInPlace):
    """Its .grad is right, and each rank steps its slice at a rate of its own."""

    limit = 1e9  # nothing is clipped

    def reduced(self) -> Tensor:
        flat = super().reduced()
        for one in self.model.parameters():
            assert one.grad is not None
            one.grad /= self.rank.world_size
        return flat * (1 + self.rank.rank)


def test_an_update_is_explained_as_a_whole_where_right_gradients_are_left_beside_it() -> None:
    options: Any = {"compare": "update", "optimizer": momentum, "steps": 1}
    text = " ".join(str(check(own_case(), AveragesInPlace, **options)).split())
    assert "several ranks compute other values than one rank" in text
    assert "return flat * (1 + self.rank.rank)" in text


@pytest.mark.parametrize(
    ("step", "steps", "layout"),
    [(ClipsItsSlice, 1, "1x4"), (ClipsItsSlice, 2, "1x2"), (SumsInPlace, 2, "1x2")],
)
def test_gradients_that_no_optimizer_steps_with_are_not_believed(
    step: Any, steps: int, layout: str
) -> None:
    options: Any = {"compare": "update", "optimizer": momentum, "clip": LIMIT, "steps": steps}
    made = own_case(layout=layout)  # four ranks fill up the last slice with zeros
    assert check(made, Sliced, **options).outcome == "same"
    verdict = check(made, step, **options)
    text = " ".join(str(verdict).split())
    assert verdict.causes == ()
    assert re.search(r"> test_owned_parameters.py:\d+ norm = squared.sqrt\(\) sqrt: ", text), text
    assert text.count("> test_owned_parameters.py") == 1  # all else follows from it
    assert "several ranks compute other values than one rank" in text


def judged(step: Any, steps: int = 1) -> Verdict:
    return check(own_case(), step, compare="update", optimizer=adamw, clip=LIMIT, steps=steps)


def test_what_other_ranks_step_is_no_difference() -> None:
    assert judged(Owned).outcome == "same"


@pytest.mark.parametrize(
    ("step", "steps"),
    [
        (ClipsToItsOwnNorm, 1),
        (ClipsToItsOwnNorm, 2),
        (ClipsAndKeepsGradients, 1),
        (DividesLater, 2),
    ],
)
def test_a_norm_of_what_a_rank_owns_is_pointed_at_beside_a_reduction_to_one_rank(
    step: Any, steps: int
) -> None:
    verdict = judged(step, steps)
    text = " ".join(str(verdict).split())
    assert verdict.outcome == "different"
    assert "missing" not in text
    assert text.count("> test_owned_parameters.py") == 1
    assert re.search(r"> test_owned_parameters.py:\d+ return total.sqrt\(\) sqrt: ", text)
    where = verdict.localisation.whereabouts
    assert where is not None
    assert "each rank's own sums or means" in where.sentence


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


class Trusted(torch.optim.SGD):
    """Layer-wise rates: a matrix is stepped in proportion to its norm over that of its gradient."""

    def gradient(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def norm(self, parameter: Tensor, gradient: Tensor) -> Any:
        return gradient.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rates = []
        for parameter in self.param_groups[0]["params"]:
            gradient = self.gradient(parameter)
            rates.append(parameter.norm() / self.norm(parameter, gradient))
            parameter.grad, gradient = gradient * rates[-1], parameter.grad
        return super().step(closure)


class Averages(Trusted):
    """It reduces a copy of each gradient when it needs it."""

    def gradient(self, parameter: Tensor) -> Tensor:
        mean = super().gradient(parameter).clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class AveragesTooLate(Averages):
    def norm(self, parameter: Tensor, gradient: Tensor) -> Any:
        own = super(Averages, self).gradient(parameter)
        return own.norm()  # of the rank's own gradient


class Trains:
    kind: type[Trusted] = Averages

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.optimizer = model, self.kind(model.parameters(), lr=LR)

    def __call__(self, shard: Rows) -> None:
        self.optimizer.zero_grad()
        loss(self.model, shard).backward()
        self.optimizer.step()


class TrainsWithOwnNorms(Trains):
    kind = AveragesTooLate


@pytest.mark.parametrize("steps", [1, 2])
def test_what_an_optimizer_reduces_inside_its_step_is_not_left_unused(steps: int) -> None:
    def trusted(parameters: Any) -> Trusted:
        return Trusted(parameters, lr=LR)

    options: Any = {"compare": "update", "optimizer": trusted, "steps": steps}
    assert check(own_case(), Trains, **options).outcome == "same"
    verdict = check(own_case(), TrainsWithOwnNorms, **options)
    text = " ".join(str(verdict).split())
    assert verdict.causes == (), text
    assert "gradients are used before they are reduced" in text
    assert "return own.norm()" in text
    # A step of the class that it is made of, which it calls, is no step of its own.
    kinds = [call.kind for call in verdict.observed[0].calls]
    assert kinds.count(Kind.OPTIMIZER_STEP) == steps
