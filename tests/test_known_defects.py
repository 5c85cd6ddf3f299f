"""Does the installed torch still have the defects of docs/known_defects.md?

A test that fails is news: either a defect is fixed, or one came back. Then the page and the row of
``DEFECTS`` must say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case import settings

pytestmark = pytest.mark.self_check

Batch = Mapping[str, Tensor]

INSTALLED = Version(torch.__version__.partition("+")[0])

TIMES = 20
"""A wrapper that outlives its group does not hang every time."""


def rows(generator: torch.Generator) -> Batch:
    return {
        "inputs": torch.randn(8, 5, generator=generator),
        "targets": torch.randn(8, 3, generator=generator),
    }


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch["inputs"]), batch["targets"])


class OutputInAnObject(nn.Module):
    @dataclass
    class Output:
        """As many libraries return it."""

        values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Output:
        return self.Output(self.layer(inputs))


def squares_of_values(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch["inputs"]).values, batch["targets"])


class TwoHeads(nn.Module):
    """The second head can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, inputs: Tensor, both: bool = True) -> Tensor:
        out: Tensor = self.first(inputs)
        return out + self.second(inputs) if both else out


def both_heads_and_one(model: nn.Module, batch: Batch) -> Tensor:
    losses = [mse_loss(model(batch["inputs"], both), batch["targets"]) for both in (True, False)]
    return (losses[0] + losses[1]) / 2


def debug_level_detail(model: nn.Module, batch: Batch, rank: Rank) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # no stubs
    ddp = DistributedDataParallel(model, process_group=dist.new_group())
    squares(ddp, batch).backward()


def static_graph_grad_before_backward(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """The gradient of the inputs is asked for first, as for a penalty."""
    ddp = DistributedDataParallel(model, static_graph=True)
    inputs = batch["inputs"].requires_grad_()
    outputs = ddp(inputs)
    torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    mse_loss(outputs, batch["targets"]).backward()


def static_graph_head_left_out(model: nn.Module, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, static_graph=True)
    for both in (True, False):
        (mse_loss(ddp(batch["inputs"], both), batch["targets"]) / 2).backward()


def static_graph_no_sync_first(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Two micro-batches are accumulated as DDP's documentation shows."""
    ddp = DistributedDataParallel(model, static_graph=True)
    first, second = ({name: value[at] for name, value in batch.items()} for at in HALVES)
    with ddp.no_sync():
        (squares(ddp, first) / 2).backward()
    (squares(ddp, second) / 2).backward()


HALVES = (slice(2), slice(2, None))
"""The micro-batches of a rank, which has four rows."""


def static_graph_opaque_output(model: nn.Module, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, static_graph=True)
    squares_of_values(ddp, batch).backward()


def static_graph_two_backwards(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Each of two losses of one output has a backward pass of its own."""
    ddp = DistributedDataParallel(model, static_graph=True)
    loss = squares(ddp, batch)
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()


def unused_parameter_after_no_sync(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Two backward passes accumulate, and the last one goes through one head only."""
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        (mse_loss(ddp(batch["inputs"]), batch["targets"]) / 2).backward()
    (mse_loss(ddp(batch["inputs"], both=False), batch["targets"]) / 2).backward()


def wrapper_not_held(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """The wrapper is freed when its forward pass has returned, and its reducer with it."""
    squares(DistributedDataParallel(model), batch).backward()


def wrapper_outlives_group(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Groups are destroyed before the wrapper that uses them is freed."""
    for _ in range(TIMES):
        model.zero_grad()
        group = dist.new_group()
        ddp = DistributedDataParallel(model, process_group=group)
        squares(ddp, batch).backward()
        dist.all_reduce(torch.ones(100), group=group)  # its thread has just worked
        dist.destroy_process_group(group)
        del group
        del ddp


@dataclass(frozen=True)
class KnownDefect:
    """``step``, ``model`` and ``loss`` show it. ``outcome``, ``cause``: of the verdict; ``words``:
    stand in its report. ``deadline``: seconds after which the ranks are taken to hang.
    ``fixed_in``: the first version of torch without it; "" if there is none yet.
    """

    step: Callable[[nn.Module, Any, Rank], None]
    outcome: str
    cause: str | None = None
    words: str = ""
    model: Callable[[], nn.Module] = lambda: nn.Linear(5, 3)
    loss: Callable[[nn.Module, Any], Tensor] = squares
    fixed_in: str = ""
    deadline: float = 60.0

    @property
    def name(self) -> str:
        return self.step.__name__


DEFECTS = (
    KnownDefect(debug_level_detail, "unknown", words="killed by SIGSEGV"),
    KnownDefect(
        static_graph_grad_before_backward, "different", words="gradients of some ranks are missing"
    ),
    KnownDefect(
        static_graph_head_left_out,
        "different",
        "backward_after_reduction",
        model=TwoHeads,
        loss=both_heads_and_one,
    ),
    KnownDefect(
        static_graph_no_sync_first,
        "unknown",
        words="expect_autograd_hooks_ INTERNAL ASSERT FAILED",
    ),
    KnownDefect(
        static_graph_opaque_output,
        "different",
        "no_all_reduce",
        model=OutputInAnObject,
        loss=squares_of_values,
    ),
    KnownDefect(static_graph_two_backwards, "different", "backward_after_reduction"),
    KnownDefect(
        unused_parameter_after_no_sync,
        "different",
        "no_all_reduce",
        model=TwoHeads,
        loss=both_heads_and_one,
    ),
    KnownDefect(wrapper_not_held, "different", "wrapper_dropped"),
    KnownDefect(
        wrapper_outlives_group,
        "unknown",
        words="still running",
        fixed_in="2.14.1",
        deadline=10.0,
    ),
)


def news(defect: KnownDefect, seen: bool, installed: Version) -> str:
    """What a reader must hear; "" if it is as the row says."""
    is_fixed = bool(defect.fixed_in) and installed >= Version(defect.fixed_in)
    if seen and is_fixed:
        return f"{defect.name} came back in torch {installed}: it was fixed in {defect.fixed_in}"
    if not seen and not is_fixed:
        return f"{defect.name} is fixed in torch {installed}: write that into its row (fixed_in)"
    return ""


@pytest.mark.parametrize(
    "defect",
    [
        # Ranks that hang are waited for.
        pytest.param(one, marks=pytest.mark.thorough if "running" in one.words else ())
        for one in DEFECTS
    ],
    ids=lambda one: one.name,
)
def test_it_is_as_its_row_says(defect: KnownDefect) -> None:
    case = Case(model=defect.model, batch=rows, loss=defect.loss, layout="1x2")
    with settings.using(settings.replaced(trial_seconds=0)):
        verdict = check(case, defect.step, deadline=defect.deadline)
    seen = (verdict.outcome, verdict.cause) == (defect.outcome, defect.cause)
    seen = seen and defect.words in " ".join(str(verdict).split())
    message = news(defect, seen, INSTALLED)
    assert not message, f"{message}\n{verdict}"


@pytest.mark.parametrize(
    ("fixed_in", "seen", "installed", "told"),
    [
        ("", True, "2.14.1", ""),
        ("", False, "2.14.1", "wrapper_not_held is fixed in torch 2.14.1"),
        ("2.14.0", True, "2.13.0", ""),
        ("2.14.0", False, "2.14.1", ""),
        ("2.14.0", True, "2.14.1", "wrapper_not_held came back in torch 2.14.1"),
    ],
)
def test_a_defect_that_is_fixed_or_comes_back_is_news(
    fixed_in: str, seen: bool, installed: str, told: str
) -> None:
    defect = KnownDefect(wrapper_not_held, "different", fixed_in=fixed_in)
    assert news(defect, seen, Version(installed)).partition(":")[0] == told


def test_the_page_lists_every_defect() -> None:
    page = (Path(__file__).parents[1] / "docs" / "known_defects.md").read_text("utf-8")
    assert [defect.name for defect in DEFECTS if f"| `{defect.name}` |" not in page] == []
