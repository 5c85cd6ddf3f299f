"""Right programs whose gradients are tiny, huge, zero, or zero but for rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.programs.common import (
    EXAMPLES,
    HIDDEN,
    OUTPUTS,
    ROW,
    Batch,
    ByHand,
    deeper_mlp,
    mean_squared_error,
    regression,
    sequences,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("scales", right=True)


def pairs(generator: torch.Generator) -> Batch:
    """Two rows for each example; the first is the better one."""
    return {"rows": torch.randn(EXAMPLES, 2, ROW, generator=generator)}


def difference(model: nn.Module, batch: Batch) -> Tensor:
    """The difference of the scores of both rows, from which the last bias cancels."""
    first, second = model(batch["rows"])[..., 0].unbind(1)
    return first - second


def hinge(model: nn.Module, batch: Batch) -> Tensor:
    """A hinge on the difference."""
    return F.relu(1 - difference(model, batch)).mean()


@programs.loss(batch=pairs)
def pairs_ranked_by_a_hinge(model: nn.Module, batch: Batch) -> Tensor:
    """The last bias cancels exactly in the big batch, and but for rounding in its shards."""
    return hinge(model, batch)


@programs.loss(batch=pairs, layout="1x3")
def pairs_ranked_by_a_sigmoid(model: nn.Module, batch: Batch) -> Tensor:
    """A logistic loss on differences of scores (Bradley-Terry)."""
    return F.softplus(-difference(model, batch)).mean()


@programs.loss(batch=pairs, dtype=torch.float32, layout="1x3")
def pairs_ranked_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """A logistic loss on differences of scores, in float32."""
    return F.softplus(-difference(model, batch)).mean()


@programs.loss(batch=pairs, dtype=torch.bfloat16, step=ByHand(hinge))
def pairs_ranked_in_bfloat16(model: nn.Module, batch: Batch) -> Tensor:
    """A hinge on differences of scores, in bfloat16, averaged by hand."""
    return hinge(model, batch)


@programs.model(layout="1x3")
class BiasBeforeLayerNorm(nn.Module):
    """A bias that is the same for all features vanishes in the normalisation after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS)
        self.shift = nn.Parameter(torch.tensor([0.3]))

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(F.layer_norm(self.first(rows) + self.shift, (HIDDEN,)))


@programs.model(layout="1x3")
class ShiftOfAllScores(nn.Module):
    """A temperature and a shift of scores before a softmax; the shift has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.shift = nn.Linear(ROW, OUTPUTS), nn.Parameter(torch.tensor([0.5]))

    def forward(self, rows: Tensor) -> Tensor:
        return (self.scores(rows) + self.shift).softmax(1)


@programs.model(layout="1x3", dtype=torch.float32)
class ScaleInvariantWeight(nn.Module):
    """A weight whose length does not matter, behind a normalisation without affine."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS)
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(F.normalize(self.first(rows) * self.scale, dim=1))


@programs.model(layout="1x3")
class DeadUnits(nn.Module):
    """Half of the units are far below zero before a ReLU, and have no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
        nn.init.constant_(self.first.bias[:4], -100.0)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(F.relu(self.first(rows)))


@programs.model(layout="1x3")
class AliveForOneExample(nn.Module):
    """A unit wakes up for few examples, so that most ranks' gradients of it are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
        nn.init.constant_(self.first.bias, -1.2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(F.relu(self.first(rows)))


@programs.loss(dtype=torch.float32)
def tiny_losses_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is multiplied by 1e-20, far above the smallest number of float32."""
    return 1e-20 * mean_squared_error(model, batch)


@programs.loss(dtype=torch.float32)
def huge_losses_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is multiplied by 1e20, far below the largest number of float32."""
    return 1e20 * mean_squared_error(model, batch)


@programs.loss()
def tiny_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is multiplied by 1e-150."""
    return 1e-150 * mean_squared_error(model, batch)


@programs.loss(model=deeper_mlp, dtype=torch.float32)
def targets_far_away(model: nn.Module, batch: Batch) -> Tensor:
    """All targets are near 10,000, so that every gradient is large and of one sign."""
    return F.mse_loss(model(batch["rows"]), batch["targets"] + 1e4)


def opposite(generator: torch.Generator) -> Batch:
    """The second half of the examples is nearly the first half, with the negative targets."""
    batch = regression(generator)
    (rows, noise), (targets, _) = (leaf.chunk(2) for leaf in batch.values())
    return {
        "rows": torch.cat([rows, rows + 0.01 * noise]),
        "targets": torch.cat([targets, -targets]),
    }


@programs.loss(batch=opposite, model=lambda: nn.Linear(ROW, OUTPUTS), layout="1x2")
def shards_that_nearly_cancel(model: nn.Module, batch: Batch) -> Tensor:
    """The gradients of the two ranks are opposite up to a hundredth."""
    return (model(batch["rows"]) * batch["targets"]).mean()


@programs.loss(
    batch=opposite, model=lambda: nn.Linear(ROW, OUTPUTS), layout="1x2", dtype=torch.float32
)
def shards_that_nearly_cancel_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """The gradients of the two ranks are opposite up to a hundredth, in float32."""
    return shards_that_nearly_cancel(model, batch)


def same_rows_on_both_ranks(generator: torch.Generator) -> Batch:
    """The second half of the examples has the rows of the first half, and other targets."""
    batch = regression(generator)
    return {"rows": torch.cat([batch["rows"][:12]] * 2), "targets": batch["targets"]}


@programs.loss(batch=same_rows_on_both_ranks, layout="1x2")
def same_rows_other_targets(model: nn.Module, batch: Batch) -> Tensor:
    """Both ranks call the model with the same rows, as with a grid of places; targets differ."""
    return mean_squared_error(model, batch)


class Places(nn.Module):
    """A curve over six fixed places, scaled by a factor for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.curve = nn.Linear(ROW, OUTPUTS)

    def forward(self) -> Tensor:
        return self.curve(torch.eye(ROW, dtype=self.curve.weight.dtype)).mean(0)


@programs.loss(model=Places)
def a_model_without_inputs(model: nn.Module, batch: Batch) -> Tensor:
    """The model is called without arguments; only the targets are data."""
    return F.mse_loss(model() * batch["rows"][:, :OUTPUTS], batch["targets"])


def layers_of_all_sizes() -> nn.Module:
    """Five layers whose weights are from a thousandth to a thousand times as large as usual."""
    layers = [nn.Linear(ROW, ROW) for _ in range(5)]
    for layer, factor in zip(layers, (1e-3, 1e3, 1e-2, 1e2, 1.0), strict=True):
        nn.init.normal_(layer.weight, std=factor)
    return nn.Sequential(*layers, nn.Linear(ROW, OUTPUTS))


@programs.model(dtype=torch.float32)
def weights_of_all_sizes() -> nn.Module:
    """Neighbouring layers have weights of very different size, in float32."""
    return layers_of_all_sizes()


@programs.step(compare="update", lr=1e-6)
def very_small_rate(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate is a millionth, so that updates are small beside the weights."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model.parameters(), 1e-6).step()


@programs.step(compare="update", lr=1e-3, dtype=torch.float32)
def small_rate_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate is a thousandth, in float32, where weights hold few digits of an update."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model.parameters(), 1e-3).step()


class FarHead(nn.Module):
    """A head whose outputs are scaled by a small factor."""

    factor = 1e-8

    def __init__(self) -> None:
        super().__init__()
        self.main, self.head = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.main(rows) + self.factor * self.head(rows)


@programs.model(layout="1x3")
class HeadFarBelow(FarHead):
    """A head that counts one hundred-millionth is trained rightly in float64."""


@programs.model(layout="1x3", dtype=torch.float32)
class HeadFarBelowInFloat32(FarHead):
    """A head that counts a ten-thousandth is trained rightly in float32."""

    factor = 1e-4


@programs.model(batch=sequences, dtype=torch.float32, layout="1x3")
class AttentionInFloat32(nn.Module):
    """The bias of the attention's keys has a gradient that is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 8), nn.Linear(8, OUTPUTS)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        return self.last(self.attention(hidden, hidden, hidden)[0].mean(1))


@programs.model(batch=sequences, dtype=torch.bfloat16, layout="1x3")
class AttentionInBfloat16(AttentionInFloat32):
    """The same attention in bfloat16."""


@programs.loss()
def one_output_of_three(model: nn.Module, batch: Batch) -> Tensor:
    """Two thirds of the last layer have a gradient of exactly zero."""
    return F.mse_loss(model(batch["rows"])[:, :1], batch["targets"][:, :1])
