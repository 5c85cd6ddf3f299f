"""What is told of a step that trains as a reference of the user's own does, but wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from tests.package.own_cases import build_model, loss, make_batch, own_case

LR, CLIMB, KEEP = 0.1, 0.5, 0.9
Rows = dict[str, Tensor]


class MeanTeacher(nn.Module):
    """The weights of a frozen teacher follow those of its student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = build_model(), build_model().requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 1 - KEEP)


def agreement(student: nn.Module, teacher: nn.Module, batch: Rows) -> Tensor:
    apart: Tensor = student(batch["rows"]) - teacher(batch["rows"])
    return loss(student, batch) + apart.square().mean()


class Teaches:
    follows = True

    def __init__(self, model: Any, rank: Rank | None = None) -> None:
        self.model = model
        self.student = model.student if rank is None else DistributedDataParallel(model.student)
        self.optimizer = torch.optim.SGD(model.student.parameters(), lr=LR)

    def __call__(self, batch: Rows) -> None:
        self.optimizer.zero_grad()
        agreement(self.student, self.model.teacher, batch).backward()
        self.optimizer.step()
        if self.follows:
            self.model.follow()


class LeavesTheTeacher(Teaches):
    follows = False


def taught(model: nn.Module) -> Teaches:
    return Teaches(model)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_frozen_parameter_that_the_reference_moves_is_compared(steps: int) -> None:
    case = Case(model=MeanTeacher, batch=make_batch, layout="1x2")
    options: Any = {"compare": "update", "reference": taught, "steps": steps}
    assert check(case, Teaches, **options).outcome == "same"
    assert check(case, LeavesTheTeacher, **options).outcome == "different"


class Trainer:
    """Steps with the gradients of all ranks; without a rank it is the reference."""

    def __init__(self, model: nn.Module, rank: Rank | None = None) -> None:
        self.model, self.rank = model, rank
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def __call__(self, batch: Rows) -> None:
        self.optimizer.zero_grad()
        loss(self.model, batch).backward()
        for parameter in self.model.parameters() if self.rank is not None else ():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()


def on_one_device(model: nn.Module) -> Trainer:
    return Trainer(model)


def test_the_first_gradients_of_a_reference_with_the_loss_of_the_case_are_explained() -> None:
    verdict = check(own_case(), Trainer, compare="update", reference=on_one_device, steps=2)
    assert verdict.cause == "sum_not_mean"
    assert "dist.all_reduce(parameter.grad)" in str(verdict)
    assert "optimizer step 1" not in str(verdict)  # the first step is that of a plain check


class Climbs:
    """Sharpness-aware minimisation: the gradient is taken where the loss is larger."""

    def __init__(self, model: nn.Module, rank: Rank | None = None) -> None:
        self.model = model
        self.second = model if rank is None else DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def __call__(self, batch: Rows) -> None:
        loss(self.model, batch).backward()
        with torch.no_grad():
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            norm = torch.stack([one.norm() for one in gradients]).norm()
            steps = [CLIMB * one / norm for one in gradients]
            for parameter, step in zip(self.model.parameters(), steps, strict=True):
                parameter.add_(step)
        self.optimizer.zero_grad()
        loss(self.second, batch).backward()
        with torch.no_grad():
            for parameter, step in zip(self.model.parameters(), steps, strict=True):
                parameter.sub_(step)
        self.optimizer.step()


def climbs_on_one_device(model: nn.Module) -> Climbs:
    return Climbs(model)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_are_used_before_they_are_reduced_are_told(steps: int) -> None:
    verdict = check(
        own_case(), Climbs, compare="update", reference=climbs_on_one_device, steps=steps
    )
    text = " ".join(str(verdict).split())
    assert "gradients are used before they are reduced" in text
    assert "loss(self.model, batch).backward() leaves the own gradients of each rank" in text
    assert "norm = torch.stack(" in text
