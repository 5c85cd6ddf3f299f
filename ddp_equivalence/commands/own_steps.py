"""Training steps as a user writes them, for faults to be planted in."""

from __future__ import annotations

import linecache
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.user_file import load
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.report.verdict import Verdict

# ``lines_right`` copies this file into a folder of its own, so that its lines are a user's lines.
# The comment at the end of a line says what the line does, in the words of ``Fault.acts_at``.

EXAMPLES, WIDTH = 16, 12


def mlp() -> nn.Module:
    """A model whose parameters all have more than eight elements."""
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def with_batch_norm() -> nn.Module:
    """A model with batch norm."""
    return nn.Sequential(nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def with_dropout() -> nn.Module:
    """A model with dropout."""
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH))


class Scaled(nn.Module):
    """A linear layer, times a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs) * self.scale


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of rows and their targets."""
    return {
        "x": torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64),
        "y": torch.randn(EXAMPLES, WIDTH, generator=generator, dtype=torch.float64),
    }


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the batch."""
    return functional.mse_loss(model(batch["x"]), batch["y"])


def sum_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum over the batch."""
    return functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


def ddp_step(model: nn.Module, batch: dict[str, Tensor], rank: Any) -> None:
    """A step with DDP."""
    ddp = DistributedDataParallel(model)  # wrap
    model.zero_grad()  # zero_grad
    outputs = ddp(batch["x"])  # forward
    loss = functional.mse_loss(outputs, batch["y"])  # loss
    loss.backward()  # backward
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def accumulating_step(model: nn.Module, batch: dict[str, Tensor], rank: Any) -> None:
    """A step with DDP that accumulates two micro-batches."""
    ddp = DistributedDataParallel(model)  # wrap
    inputs, targets = batch["x"].chunk(2), batch["y"].chunk(2)
    with ddp.no_sync():  # no_sync
        first = ddp(inputs[0])  # first forward
        (functional.mse_loss(first, targets[0]) / 2).backward()  # first backward
    last = ddp(inputs[1])  # forward
    (functional.mse_loss(last, targets[1]) / 2).backward()  # backward


def by_hand_step(model: nn.Module, batch: dict[str, Tensor], rank: Any) -> None:
    """A step that adds the gradients of a summed loss up."""
    loss = sum_loss(model, batch)
    loss.backward()  # backward
    total = torch.zeros(1)
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # all_reduce


def gathering_step(model: nn.Module, batch: dict[str, Tensor], rank: Any) -> None:
    """A step with DDP whose loss is that of the whole batch, on every rank."""
    ddp = DistributedDataParallel(model)  # wrap
    targets = torch.cat(collectives.all_gather(batch["y"]))
    own = ddp(batch["x"])  # forward
    outputs = torch.cat(collectives.all_gather(own))  # gather
    loss = functional.mse_loss(outputs, targets)  # loss
    loss.backward()  # backward


def _case(layout: str = "2x2", **changes: Any) -> Case:
    fields: dict[str, Any] = {"model": mlp, "batch": rows, "loss": mean_loss}
    return Case(**(fields | {"dtype": torch.float64, "layout": layout} | changes))


with_ddp = _case(), ddp_step
of_two_batches = _case(), ddp_step, {"steps": 2}
on_unequal_nodes = _case("1+3"), ddp_step
on_three_ranks = _case("1x3", shards="uneven"), ddp_step
of_batch_norm = _case(model=with_batch_norm), ddp_step
of_buffers = _case(model=Scaled), ddp_step
of_dropout = _case(model=with_dropout), ddp_step
accumulating = _case(), accumulating_step
by_hand = _case(loss=sum_loss), by_hand_step
gathering = _case(), gathering_step


# Plant faults in steps of one's own: does the report point at the line at which they act?


def lines_right(names: Iterable[str]) -> dict[str, bool]:
    """For each of these faults that can be planted in a step of one's own: is its line right?"""
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="ddp_equivalence-own-") as folder:
        path = Path(shutil.copy(__file__, folder))
        for name in names:
            fault = FAULTS[name]
            if not fault.own_step:
                continue
            user = load(path, fault.own_step)
            with planted(name):
                verdict = check(user.case, user.step, **user.options)
            found[name] = points_at(verdict, fault.cause, fault.acts_at)
    return found


def points_at(verdict: Verdict, cause: str, marks: tuple[str, ...]) -> bool:
    """True if the report names this cause, and calls only lines with these marks its fault."""
    for finding in verdict.findings:
        if finding.accepted and cause in finding.causes:
            faulty = [one.line for one in finding.lines if one.is_fault]
            texts = [linecache.getline(line.file, line.number) for line in faulty]
            return bool(texts) and all(text.rpartition("# ")[2].strip() in marks for text in texts)
    return False
