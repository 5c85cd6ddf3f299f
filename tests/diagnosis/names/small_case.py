"""A small regression on twelve examples, and what the steps of these tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case import settings
from ddp_equivalence.report.verdict import Verdict
from tests.package.own_cases import own_case

Step = Callable[[nn.Module, Any, Rank], None]
Loss = Callable[[nn.Module, Any], Tensor]


NOTHING = ""
"""The causes of a report that names none."""


@dataclass(frozen=True)
class Told:
    """A wrong step, and what its report tells.

    ``causes``: all that it names, with blanks between them; None if others may be named as well.
    ``not_named``: causes that it does not name. ``at_most``: as many causes. ``says``: words of the
    report. ``not_said``: a pattern of words that are not in it. ``watched``: with a second run.
    """

    step: Step
    case: Case = field(default_factory=own_case)
    causes: str | None = None
    not_named: tuple[str, ...] = ()
    at_most: int = 9
    says: str = ""
    not_said: str = ""
    watched: bool = True


def case(layout: str = "1x2", **changes: Any) -> Case:
    return own_case(layout=layout, **changes)


def average(model: nn.Module, divisor: float) -> None:
    """All-reduce every gradient by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= divisor


def by_hand(loss: Loss) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        loss(model, shard).backward()
        average(model, rank.world_size)

    return step


def sums_up(loss: Loss) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        loss(model, shard).backward()
        average(model, 1)

    return step


def under_ddp(loss: Loss) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        loss(ddp, shard).backward()

    return step


def checked(case: Case, step: Step, second_look: bool) -> Verdict:
    """The verdict of a check, with or without the watched second run."""
    with settings.using(settings.replaced(second_look=second_look)):
        return check(case, step)


def report_of(verdict: Verdict) -> str:
    """Everything that the report says, on one line."""
    return " ".join(verdict.full_report().split())
