"""Right programs in low precision in which rounding decides: routes, kinks, steps of a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import SGD

from benchmarks.programs.common import (
    EXAMPLES,
    HIDDEN,
    OUTPUTS,
    ROW,
    Batch,
    UnderDdp,
    images,
    mean_squared_error,
    pieces,
    sequences,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("rounding", right=True)


@programs.model(batch=sequences, dtype=torch.float32)
class LstmInFloat32(nn.Module):
    """A bidirectional nn.LSTM in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(ROW, HIDDEN, bidirectional=True, batch_first=True)
        self.last = nn.Linear(2 * HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.layer(rows)[0][:, -1])


@programs.model(dtype=torch.float32)
def spectral_norm_in_float32() -> nn.Module:
    """A weight is divided by its largest singular value, in float32."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(ROW, HIDDEN)), nn.Linear(HIDDEN, OUTPUTS)
    )


@programs.model(dtype=torch.bfloat16)
def weight_norm_in_bfloat16() -> nn.Module:
    """Length and direction of a weight are separate parameters, in bfloat16."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(ROW, HIDDEN)), nn.Linear(HIDDEN, OUTPUTS)
    )


@programs.model(dtype=torch.bfloat16, batch=images, layout="2x2")
def group_norm_in_bfloat16() -> nn.Module:
    """Convolution, group norm and maximum over windows, in bfloat16."""
    layers = (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, OUTPUTS))


class Routed(nn.Module):
    """Every row goes to the expert with the highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(ROW, 3)
        self.experts = nn.ModuleList([nn.Linear(ROW, OUTPUTS) for _ in range(3)])

    def forward(self, rows: Tensor) -> Tensor:
        gates, chosen = self.router(rows).softmax(1).max(1)
        each = torch.stack([expert(rows) for expert in self.experts], 1)
        return gates[:, None] * each[torch.arange(len(rows)), chosen]


@programs.model(dtype=torch.float32)
class RoutedInFloat32(Routed):
    """A mixture of experts routes in float32 as it does in float64."""


@programs.model(dtype=torch.bfloat16, layout="2x2")
class RoutedInBfloat16(Routed):
    """A mixture of experts whose routes may turn out otherwise in bfloat16 than in float64."""


class Rounded(nn.Module):
    """Weights are rounded to a grid, and the gradient passes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, ROW))

    def forward(self, rows: Tensor) -> Tensor:
        grid = (8 * self.weight).round() / 8
        return rows @ (self.weight + (grid - self.weight).detach()).T


@programs.model(dtype=torch.float32)
class TrainedOnAGrid(Rounded):
    """Quantisation-aware training in float32."""


@programs.loss(dtype=torch.float32)
def kinks_everywhere(model: nn.Module, batch: Batch) -> Tensor:
    """Sums of absolute values and maxima, in float32."""
    outputs = model(batch["rows"]) - batch["targets"]
    return outputs.abs().amax(1).mean() + F.relu(outputs).mean()


@programs.loss(dtype=torch.bfloat16, layout="2x2")
def kinks_in_bfloat16(model: nn.Module, batch: Batch) -> Tensor:
    """The absolute error in bfloat16."""
    return F.l1_loss(model(batch["rows"]), batch["targets"])


def whole_numbers(generator: torch.Generator) -> Batch:
    """Rows of ones and minus ones, for which many sums are exactly zero."""
    rows = torch.randint(0, 2, (EXAMPLES, ROW), generator=generator) * 2.0 - 1
    return {"rows": rows, "targets": rows[:, :OUTPUTS].clone()}


class Signs(nn.Module):
    """A layer whose weights are ones and minus ones, and a ReLU at its kink."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 4, bias=False), nn.Linear(4, OUTPUTS)
        self.first.weight.data.sign_()
        self.first.weight.data[:, -1] = 0

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(F.relu(self.first(rows)))


@programs.model(batch=whole_numbers, dtype=torch.float32)
class AtTheKink(Signs):
    """Many inputs of a ReLU are exactly zero."""


def three_batches(generator: torch.Generator) -> Batch:
    """The examples of three steps."""
    return {
        "rows": torch.randn(72, ROW, generator=generator),
        "targets": torch.randn(72, OUTPUTS, generator=generator),
    }


def train(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Three steps of SGD under DDP."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), 0.05)
    for each in pieces(joined, len(joined["rows"]) // 3):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()


@programs.step(compare="update", lr=0.05, steps=3, batch=three_batches, dtype=torch.float32)
def three_steps_in_float32(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Three steps of SGD in float32."""
    train(model, joined, rank)


class Ranked(nn.Module):
    """The difference of the scores of two halves of a row, from which the bias cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.last = nn.Linear(2, 4), nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.score(rows[:, :2])) - self.last(self.score(rows[:, 2:4]))


def hinge(model: nn.Module, batch: Batch) -> Tensor:
    """A hinge on the differences."""
    return F.relu(1 - model(batch["rows"])).mean()


@programs.step(model=Ranked, loss=hinge, compare="update", lr=0.05, layout="1x3")
def a_bias_that_does_not_move(model: nn.Module, shard: Any, rank: Rank) -> None:
    """One step of SGD, in which the last bias moves by rounding alone."""
    ddp = DistributedDataParallel(model)
    hinge(ddp, shard).backward()
    SGD(model.parameters(), 0.05).step()


@programs.model(
    layout="2x4",
    step=UnderDdp(mean_squared_error, {"gradient_as_bucket_view": True}),
    dtype=torch.float32,
)
def eight_ranks_in_float32() -> nn.Module:
    """Two nodes with four ranks each, three examples on each rank."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUTPUTS))
