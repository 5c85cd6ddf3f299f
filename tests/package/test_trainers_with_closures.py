"""Trainers that go backward in a closure, inside the optimizer's step, as Lightning's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from ddp_equivalence import Rank, check
from ddp_equivalence.case.training import AtSteps, StepRecord
from tests.package.own_cases import build_model, loss, make_batch, own_case
from tests.package.own_trainers import STEPS, Trainer, adamw, rows_of_step


class WithClosure(Trainer):
    """Goes backward inside the step of the optimizer."""

    makes: Callable[[list[nn.Parameter]], Any] = staticmethod(adamw)
    by_name = True
    times = 1
    dropped = 0

    def __call__(self, model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        optimizer = self.makes(list(ddp.parameters()))
        count = len(shard["rows"]) // STEPS
        for step in range(STEPS):
            numbers = torch.arange(step * count, (step + 1) * count - self.dropped)

            def closure(numbers: Tensor = numbers) -> Tensor:
                optimizer.zero_grad()
                value = self.times * loss(ddp, rows_of_step(shard, numbers))
                value.backward()
                return value

            if self.by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)


class WithPositionalClosure(WithClosure):
    by_name = False


class TwiceTheLoss(WithClosure):
    times = 2


def lbfgs(parameters: list[nn.Parameter]) -> LBFGS:
    return LBFGS(parameters, lr=0.1, max_iter=3)


class WithLbfgs(WithClosure):
    """Its optimizer calls the closure several times in each step."""

    makes = staticmethod(lbfgs)


class DropsAnExampleWithLbfgs(WithLbfgs):
    """LBFGS makes the same steps for any multiple of the loss, so a factor would not be seen."""

    dropped = 1


class LbfgsInOneProcess:
    """What WithLbfgs does, on the big batch of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, lbfgs(list(model.parameters()))

    def __call__(self, batch: dict[str, Tensor]) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            value = loss(self.model, batch)
            value.backward()
            return value

        self.optimizer.step(closure)


WITH_ADAMW: Any = {"compare": "update", "optimizer": adamw, "steps": STEPS}
WITH_LBFGS: Any = {"compare": "update", "reference": LbfgsInOneProcess, "steps": STEPS}


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (WithClosure(), WITH_ADAMW),
        (WithPositionalClosure(), WITH_ADAMW),
        (WithLbfgs(), WITH_LBFGS),
    ],
    ids=["by_name", "positional", "lbfgs"],
)
def test_a_right_trainer_with_a_closure_is_the_same(trainer: Any, options: Any) -> None:
    assert check(own_case(), trainer, **options).outcome == "same"


def test_a_wrong_factor_in_a_closure_is_told_with_its_line() -> None:
    verdict = check(own_case(), TwiceTheLoss(), **WITH_ADAMW)
    where = verdict.localisation.whereabouts
    assert verdict.cause is None  # one rank has the factor as well, so that it is no sum over ranks
    assert where is not None
    assert where.headline == "every gradient is 2 times the big batch's"
    assert "value = self.times * loss(" in str(verdict)
    assert verdict.wrong_step is not None
    assert (verdict.wrong_step.number, verdict.wrong_step.differs) == (1, "gradients")


def test_wrong_gradients_in_a_closure_that_runs_often_are_told_from_wrong_weights() -> None:
    verdict = check(own_case(), DropsAnExampleWithLbfgs(), **WITH_LBFGS)
    assert verdict.outcome == "different"
    assert verdict.wrong_step is not None
    assert (verdict.wrong_step.number, verdict.wrong_step.differs) == (1, "gradients")


def test_the_gradients_of_a_step_are_those_of_the_first_run_of_its_closure() -> None:
    model, batch = build_model(), make_batch(torch.Generator().manual_seed(0))
    names, parameters = zip(*model.named_parameters(), strict=True)
    right = torch.autograd.grad(loss(model, batch), parameters)
    record = StepRecord(lambda: dict(model.named_parameters()), AtSteps(gradients=True))
    with record.watched():
        LbfgsInOneProcess(model)(batch)
    assert record.count == 1
    seen = [record.gradients[0, name] for name in names]
    torch.testing.assert_close(seen, list(right), rtol=0, atol=0)
