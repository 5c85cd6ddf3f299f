"""The model, the batch and the loss of the faulty steps, and what is asked of each.

In each faulty step the faulty line ends with the comment ``# fault``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.where.find_whereabouts import find_whereabouts
from ddp_equivalence.diagnosis.where.whereabouts import Whereabouts

NEAR = 2
"""The faulty line is found if a line so near to it is pointed at."""


class Small(nn.Module):
    """Three linear layers, and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Any:
        hidden = torch.tanh(self.norm(self.first(rows)))
        return self.head(torch.tanh(self.middle(hidden)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(16, 6, generator=generator),
        "targets": torch.randn(16, 3, generator=generator),
    }


def loss(model: Callable[[Tensor], Tensor], examples: dict[str, Tensor]) -> Any:
    return nn.functional.mse_loss(model(examples["rows"]), examples["targets"])


CASE = Case(model=Small, batch=batch, loss=loss, layout="1x4")


def average(model: Any) -> None:
    """Reduce as right code does."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def marked_line(step: Callable[..., Any]) -> int:
    """The number of the line with the comment ``# fault``, in the step or in its file."""
    lines, first = inspect.getsourcelines(step)
    numbers = [first + n for n, line in enumerate(lines) if line.rstrip().endswith("# fault")]
    assert len(numbers) == 1, step.__name__
    return numbers[0]


def where(case: Case, step: Callable[..., Any], **options: Any) -> Whereabouts:
    """Where the step goes astray. If it has no name, the report must say the same."""
    verdict = check(case, step, **options)
    assert verdict.outcome == "different", str(verdict)
    assert verdict.view is not None
    found = find_whereabouts(verdict.view)
    shown = found if verdict.cause is not None else verdict.localisation.whereabouts
    assert shown is not None
    assert shown.sentence.endswith(found.sentence)
    assert verdict.cause is not None or shown.sentence[:30] in " ".join(str(verdict).split())
    assert len(shown.headline.split()) <= 12
    assert len(shown.lines) <= 3
    return shown


def unnamed(case: Case, step: Callable[..., Any]) -> Whereabouts:
    """Where the report on a step without a known cause says that the difference is."""
    verdict = check(case, step)
    assert verdict.outcome == "different", str(verdict)
    assert verdict.cause is None, str(verdict)
    found = verdict.localisation.whereabouts
    assert found is not None
    assert found.beside_one_rank in " ".join(str(verdict).split())
    return found


def distance(found: Whereabouts, step: Callable[..., Any]) -> int:
    """How many lines lie between the faulty line and the nearest one that is pointed at."""
    fault = marked_line(step)
    file = inspect.getsourcefile(step)
    near = [abs(one.line.number - fault) for one in found.lines if one.line.file == file]
    return min(near, default=1_000)
