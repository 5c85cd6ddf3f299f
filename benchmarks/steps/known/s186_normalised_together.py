"""Batch norm whose statistics are those of all ranks, with a backward pass of our own."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

EPSILON = 1e-5


class NormaliseTogether(torch.autograd.Function):
    """Normalises the columns of ``x``, then scales and shifts them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([float(len(x))])])
        dist.all_reduce(sums)
        count, width = sums[-1], x.shape[1]
        mean = sums[:width] / count
        inverse = (sums[width : 2 * width] / count - mean.square() + EPSILON).rsqrt()
        normal = (x - mean) * inverse
        ctx.save_for_backward(normal, weight, inverse)
        return normal * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normal, weight, inverse = ctx.saved_tensors
        grad_bias, grad_weight = grad.sum(0), (grad * normal).sum(0)
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums)
        mean_grad, mean_product = sums / (len(grad) * dist.get_world_size())
        grad_x = (grad - mean_grad - normal * mean_product) * inverse * weight
        return grad_x, grad_weight, grad_bias


class BatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.together = False

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            return NormaliseTogether.apply(x, self.weight, self.bias)
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=EPSILON)


def build_model() -> nn.Module:
    first = [nn.Linear(6, 10), BatchNorm(10), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(10, 8), BatchNorm(8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["species"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(20, 6, generator=generator),
        "species": torch.randint(0, 3, (20,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2", shards="12+8")


def normalise_together(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.together = True
    return model


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(normalise_together(model))
    examples = torch.tensor(len(shard["species"]), device=rank.device)
    dist.all_reduce(examples)
    share = len(shard["species"]) * rank.world_size / examples
    (loss(ddp, shard) * share).backward()
