"""A picture classifier. Its batch norm layers share their statistics between the ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
OVER_PIXELS = (0, 2, 3)


def conv_block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.SiLU(),
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        conv_block(3, 6, stride=2),
        conv_block(6, 8, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pictures"]), batch["labels"], label_smoothing=0.1)


def make_batch(generator: torch.Generator) -> Batch:
    brightness = torch.rand(16, 1, 1, 1, generator=generator)
    return {
        "pictures": torch.randn(16, 3, 8, 8, generator=generator) + brightness,
        "labels": torch.randint(4, (16,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


class SharedBatchNorm(nn.Module):
    """Normalises with the mean and the variance of the pictures of all ranks."""

    def __init__(self, local: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = local.weight, local.bias, local.eps
        self.momentum = local.momentum
        self.register_buffer("running_mean", local.running_mean)
        self.register_buffer("running_var", local.running_var)

    @staticmethod
    def of_all_ranks(statistic: Tensor) -> Tensor:
        return all_reduce(statistic) / dist.get_world_size()

    def forward(self, x: Tensor) -> Tensor:
        mean = self.of_all_ranks(x.mean(OVER_PIXELS))
        variance = self.of_all_ranks(x.var(OVER_PIXELS, unbiased=False))
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def convert(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, SharedBatchNorm(child))
        else:
            convert(child)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    convert(model)
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    loss(ddp, shard).backward()
