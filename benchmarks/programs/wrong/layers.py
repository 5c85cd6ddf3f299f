"""Layers that mix the examples of a rank, or that a step treats differently on some ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    Batch,
    ByHand,
    UnderDdp,
    average,
    gradients,
    images,
    mean_squared_error,
    mlp,
    regression,
    sequences,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("layers", right=False)


@programs.model()
def batch_norm_in_training() -> nn.Module:
    """nn.BatchNorm1d normalises with the statistics of the rank's own examples."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 3))


@programs.model(batch=images, step=ByHand(mean_squared_error))
def batch_norm_of_images() -> nn.Module:
    """nn.BatchNorm2d has only the rank's own images, and gradients are averaged by hand."""
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(48, OUTPUTS))


@programs.model()
def batch_norm_without_affine_in_the_input() -> nn.Module:
    """The input is standardised over the rank's own rows."""
    return nn.Sequential(nn.BatchNorm1d(ROW, affine=False), mlp())


@programs.model()
class StandardisedByHand(nn.Module):
    """Outputs are divided by their standard deviation over the rank's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, rows: Tensor) -> Tensor:
        outputs = self.layers(rows)
        return outputs / outputs.std(0)


@programs.model()
class CentredByTheBatch(nn.Module):
    """The mean over the rank's examples is subtracted, as a teacher's outputs are in DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, rows: Tensor) -> Tensor:
        outputs = self.layers(rows)
        return outputs - outputs.mean(0)


@programs.model()
class MinibatchDeviation(nn.Module):
    """The mean deviation over the rank's examples becomes a feature, as in discriminators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN + 1, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        feature = hidden.std(0).mean().expand(len(rows), 1)
        return self.last(torch.cat([hidden, feature], 1))


@programs.model()
class ScaledByTheLargest(nn.Module):
    """Activations are divided by the largest of the rank, as in dynamic quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        return self.last(hidden / hidden.abs().max())


@programs.model(batch=sequences)
class RecurrenceOverExamples(nn.Module):
    """batch_first was forgotten, so the nn.GRU runs from example to example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.layer(rows)[0][:, -1])


@programs.model(batch=sequences)
class AttentionOverExamples(nn.Module):
    """batch_first was forgotten, so examples attend to the other examples of their rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 8), nn.Linear(8, OUTPUTS)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        return self.last(self.attention(hidden, hidden, hidden)[0].mean(1))


@programs.model(batch=sequences)
class EncoderOverExamples(nn.Module):
    """nn.TransformerEncoderLayer without batch_first mixes the examples of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 8), nn.Linear(8, OUTPUTS)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.layer(self.first(rows)).mean(1))


@programs.model()
class SoftmaxOverExamples(nn.Module):
    """The softmax has the wrong dim, so that the examples of a rank share the weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.gate(rows).softmax(0))


@programs.model(batch=images)
class NormalisedOverTheBatch(nn.Module):
    """layer_norm got the shape of the whole shard, not of one image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(2, 3, 3), nn.Linear(48, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.layer(rows)
        return self.last(F.layer_norm(hidden, hidden.shape).flatten(1))


@programs.model(layout="2x2")
class ExpertsWithCapacity(nn.Module):
    """An expert takes the best half of the rank's examples, and not of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert, self.rest = nn.Linear(ROW, 1), nn.Linear(ROW, 3), nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        scores = self.router(rows).squeeze(1)
        best = scores.topk(len(rows) // 2).indices
        gain = scores[best, None].sigmoid() * self.expert(rows[best])
        return self.rest(rows).index_add(0, best, gain)


@programs.model()
class MixedWithTheNeighbour(nn.Module):
    """Every example is mixed with the one before it on its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(0.8 * rows + 0.2 * rows.roll(1, 0))


@programs.step(model=lambda: nn.Sequential(nn.Linear(ROW, 7), nn.PReLU(7), nn.Linear(7, OUTPUTS)))
def slopes_not_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only parameters with two dims are averaged: the PReLU's slopes and biases are skipped."""
    mean_squared_error(model, shard).backward()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@programs.step(model=lambda: nn.Sequential(nn.LayerNorm(ROW), nn.Linear(ROW, OUTPUTS)))
def normalisation_layers_skipped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only nn.Linear layers are averaged, and LayerNorm is forgotten."""
    mean_squared_error(model, shard).backward()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            average(module, rank)


@programs.step(batch=regression)
def one_layer_in_eval_mode_on_a_rank(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Rank 1 skips the activation, as after a forgotten call of train()."""
    if rank.rank == 1:
        model[1] = nn.Identity()
    UnderDdp(mean_squared_error)(model, shard, rank)


def convolution() -> nn.Module:
    """A convolution along the row."""
    return nn.Sequential(
        nn.Unflatten(1, (1, ROW)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)
    )


@programs.step(model=convolution)
def kernels_flipped_on_the_way(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradients of kernels come back from a buffer in another memory order."""
    mean_squared_error(model, shard).backward()
    average(model, rank)
    gradients(model)[0].copy_(gradients(model)[0].flip(-1))
