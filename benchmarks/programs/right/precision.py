"""Right programs in float32 and bfloat16, with scaling, clipping and casts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    Batch,
    ByHand,
    LanguageModel,
    UnderDdp,
    average,
    classes,
    cross_entropy,
    deeper_mlp,
    gradients,
    images,
    mean_squared_error,
    pieces,
    words,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("precision", right=True)


@programs.model(dtype=torch.float32)
def float32_model() -> nn.Module:
    """Plain DDP in float32."""
    return deeper_mlp()


@programs.model(dtype=torch.bfloat16, step=ByHand(mean_squared_error))
def bfloat16_model() -> nn.Module:
    """Gradients are averaged by hand in bfloat16."""
    return deeper_mlp()


@programs.model(dtype=torch.float32, batch=images)
def float32_convolutions() -> nn.Module:
    """Convolutions, group norm and pooling in float32."""
    layers = (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, OUTPUTS))


def scores_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy of scores that are widened to float32."""
    return F.cross_entropy(model(batch["rows"]).float(), batch["labels"])


@programs.loss(dtype=torch.bfloat16, batch=classes)
def bfloat16_with_a_loss_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """The model is in bfloat16, and its scores are widened before the loss."""
    return scores_in_float32(model, batch)


@programs.loss(dtype=torch.float32, batch=classes)
def float32_with_a_loss_in_float64(model: nn.Module, batch: Batch) -> Tensor:
    """The scores of a float32 model are widened to float64 before the loss."""
    return F.cross_entropy(model(batch["rows"]).double(), batch["labels"])


@programs.loss(batch=classes, layout="1x3", rounds_in=torch.float32)
def float64_with_a_loss_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that always computes in float32, as many libraries have it, in a float64 model."""
    return scores_in_float32(model, batch)


@programs.step(dtype=torch.float32)
def scaled_by_a_power_of_two(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss is multiplied by 65536 and the gradients are divided by it, after the average."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * 65536).backward()
    for gradient in gradients(model):
        gradient /= 65536


@programs.step(dtype=torch.float32)
def scaled_by_an_odd_number(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A scale of 3000 is taken out before the average, which rounds once more."""
    (mean_squared_error(model, shard) * 3000).backward()
    for gradient in gradients(model):
        gradient /= 3000
    average(model, rank)


@programs.step(dtype=torch.float32)
def checked_for_overflow_on_all_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank looks for infinities, all agree on the answer, and then gradients are unscaled."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * 1024).backward()
    found = torch.tensor(float(not all(g.isfinite().all() for g in gradients(model))))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    for gradient in gradients(model):
        gradient *= 0 if found else 1 / 1024


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error under autocast to bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch["rows"])
    return F.mse_loss(outputs.to(batch["targets"].dtype), batch["targets"])


@programs.loss(dtype=torch.float32, rounds_in=torch.bfloat16)
def autocast_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """The forward pass runs under autocast, in the big batch's loss as well."""
    return autocast_loss(model, batch)


@programs.loss(dtype=torch.float32, step=ByHand(autocast_loss), model=deeper_mlp)
def autocast_in_float32_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """The forward pass runs under autocast, and gradients are averaged by hand in float32."""
    return autocast_loss(model, batch)


@programs.loss(layout="1x3")
def autocast_in_float64(model: nn.Module, batch: Batch) -> Tensor:
    """On the CPU autocast leaves float64 as it is, so that it changes nothing."""
    return autocast_loss(model, batch)


@programs.step()
def clipped_far_above(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The norm is clipped after the average, at ten thousand times what it is."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    nn.utils.clip_grad_norm_(model.parameters(), 1e4)


@programs.step()
def clipped_after_the_average(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The norm is clipped after the average; gradients are compared as they were before it."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@programs.step()
def returned_before_the_clip(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor]:
    """The clip bites; the step returns the gradients as they were before it."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return before


@programs.step(dtype=torch.float32)
def norm_logged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The norm of the gradients is computed on every rank, averaged and logged."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    norm = nn.utils.get_total_norm(gradients(model))
    dist.all_reduce(norm, op=dist.ReduceOp.AVG)


@programs.step(dtype=torch.float32)
def micro_batches_added_in_float64(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients of micro-batches are added in float64, averaged, and rounded once."""
    window = pieces(shard, 2)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for each in window:
        model.zero_grad()
        (mean_squared_error(model, each) / len(window)).backward()
        for total, gradient in zip(sums, gradients(model), strict=True):
            total += gradient
    for total, gradient in zip(sums, gradients(model), strict=True):
        dist.all_reduce(total)
        gradient.copy_(total / rank.world_size)


@programs.step(dtype=torch.float32)
def trained_in_float64(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A wider copy of the model computes the gradients, which are rounded at the end."""
    wide = copy.deepcopy(model).double()
    ddp = DistributedDataParallel(wide)
    mean_squared_error(ddp, {name: leaf.double() for name, leaf in shard.items()}).backward()
    for parameter, exact in zip(model.parameters(), wide.parameters(), strict=True):
        parameter.grad = exact.grad.float()


class TwoPrecisions(nn.Module):
    """A body in bfloat16 and a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(ROW, HIDDEN).bfloat16(), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.body(rows.to(self.body.weight.dtype))
        return self.head(torch.tanh(hidden).to(self.head.weight.dtype))


def wide_error(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error in the precision of the targets."""
    return F.mse_loss(model(batch["rows"]).to(batch["targets"].dtype), batch["targets"])


@programs.loss(model=TwoPrecisions, dtype=None, rounds_in=torch.bfloat16)
def body_in_bfloat16(model: nn.Module, batch: Batch) -> Tensor:
    """The model keeps the two precisions in which it is built."""
    return wide_error(model, batch)


@programs.step(dtype=torch.bfloat16, layout="2x2", batch=classes, loss=cross_entropy)
def bfloat16_divided_before_the_sum(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank divides its gradients by the world size before they are summed."""
    cross_entropy(model, shard).backward()
    for gradient in gradients(model):
        gradient /= rank.world_size
        dist.all_reduce(gradient)


class SmallHead(nn.Module):
    """A head whose outputs are scaled by 0.003."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.head = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.main(rows) + 0.003 * self.head(rows)


@programs.model(dtype=torch.bfloat16)
class SmallHeadInBfloat16(SmallHead):
    """A head that counts 0.003 is trained rightly in bfloat16."""


def spread_out(generator: torch.Generator) -> Batch:
    """Rows and targets of very different sizes."""
    rows = torch.randn(24, ROW, generator=generator) * torch.logspace(-3, 3, 24)[:, None]
    return {"rows": rows, "targets": torch.randn(24, OUTPUTS, generator=generator)}


@programs.loss(batch=spread_out, dtype=torch.float32)
def examples_of_very_different_size(model: nn.Module, batch: Batch) -> Tensor:
    """Rows from a thousandth to a thousand, in float32 under a tanh."""
    return mean_squared_error(model, batch)


def word_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared score of the first class, over all words."""
    return model(batch["rows"])[..., 0].square().mean()


@programs.loss(model=LanguageModel, batch=words, dtype=torch.bfloat16)
def embeddings_in_bfloat16(model: nn.Module, batch: Batch) -> Tensor:
    """An embedding in bfloat16, whose rows collect few or many words."""
    return word_loss(model, batch)


@programs.step(rounds_in=torch.float32)
def averaged_in_the_models_own_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The all-reduce runs in float32, in which the model is built, and the check in float64."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        narrow = gradient.float()
        dist.all_reduce(narrow, op=dist.ReduceOp.AVG)
        gradient.copy_(narrow)


@programs.step(dtype=torch.float32, rounds_in=torch.bfloat16)
def autocast_in_the_step_alone(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step runs under autocast, and the big batch's loss does not."""
    ddp = DistributedDataParallel(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = ddp(shard["rows"])
    F.mse_loss(outputs.float(), shard["targets"]).backward()
