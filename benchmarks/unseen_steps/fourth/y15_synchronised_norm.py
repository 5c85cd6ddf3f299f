"""Keyword spotting with a batch norm of our own, whose statistics are those of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLIPS, BANDS, FRAMES, KEYWORDS, WIDTH = 12, 6, 14, 5, 8


def per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1)


class SyncNormFunction(torch.autograd.Function):
    """Batch norm of (examples, channels, frames) over the examples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Any
    ) -> Tensor:
        count = inputs.new_full((1,), inputs.numel() / inputs.shape[1])
        sums = torch.cat([inputs.sum(dim=(0, 2)), inputs.square().sum(dim=(0, 2)), count])
        dist.all_reduce(sums, group=group)
        channels = inputs.shape[1]
        mean, mean_square = sums[:channels] / sums[-1], sums[channels:-1] / sums[-1]
        inverse = (mean_square - mean.square() + eps).rsqrt()
        normalised = (inputs - per_channel(mean)) * per_channel(inverse)
        ctx.save_for_backward(normalised, weight, inverse, sums[-1])
        ctx.group = group
        return normalised * per_channel(weight) + per_channel(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight, inverse, count = ctx.saved_tensors
        sum_grad = grad.sum(dim=(0, 2))
        sum_grad_normalised = (grad * normalised).sum(dim=(0, 2))
        for total in (sum_grad, sum_grad_normalised):
            dist.all_reduce(total, group=ctx.group)
        shift = per_channel(sum_grad / count)
        tilt = normalised * per_channel(sum_grad_normalised / count)
        grad_inputs = (grad - shift - tilt) * per_channel(weight * inverse)
        return grad_inputs, sum_grad_normalised, sum_grad, None, None


class Norm(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps
        self.group: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.group is None:
            return F.batch_norm(
                inputs, None, None, self.weight, self.bias, training=True, eps=self.eps
            )
        return SyncNormFunction.apply(inputs, self.weight, self.bias, self.eps, self.group)


class KeywordSpotter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(BANDS, WIDTH, 3, bias=False),
            Norm(WIDTH),
            nn.SiLU(),
            nn.Conv1d(WIDTH, WIDTH, 3, bias=False),
            Norm(WIDTH),
            nn.SiLU(),
        )
        self.head = nn.Linear(WIDTH, KEYWORDS)

    def forward(self, spectrogram: Tensor) -> Tensor:
        return self.head(self.body(spectrogram).mean(dim=-1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["spectrogram"]), batch["keyword"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "spectrogram": torch.randn(CLIPS, BANDS, FRAMES, generator=generator),
        "keyword": torch.randint(KEYWORDS, (CLIPS,), generator=generator),
    }


case = Case(model=KeywordSpotter, batch=make_batch, loss=loss, layout="1x2")


def synchronise_norms(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Norm):
            module.group = group
    return model


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(synchronise_norms(model, dist.group.WORLD))
    loss(ddp, shard).backward()
