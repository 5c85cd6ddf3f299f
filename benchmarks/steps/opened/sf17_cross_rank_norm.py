"""A video network with hybrid sharding and a batch norm of our own, since SyncBatchNorm needs a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

CHANNELS, FRAMES, ACTIONS = 3, 6, 4


class SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is the sum over the same ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class CrossRankNorm(nn.Module):
    """Batch norm over (examples, channels, time). With a group, its statistics are of all its ranks."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps
        self.group: dist.ProcessGroup | None = None

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([x.mean(dim=(0, 2)), x.square().mean(dim=(0, 2))])
        if self.group is not None:
            both = SumOverRanks.apply(both, self.group) / dist.get_world_size(self.group)
        mean, square = both.unbind(0)
        return mean.view(1, -1, 1), (square - mean.square()).view(1, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.moments(x)
        x = (x - mean) * torch.rsqrt(variance + self.eps)
        return x * self.scale.view(1, -1, 1) + self.shift.view(1, -1, 1)


class VideoNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for inputs in (CHANNELS, 7):
            convolution = nn.Conv1d(inputs, 7, kernel_size=3, padding=1, bias=False)
            self.stages.append(nn.Sequential(convolution, CrossRankNorm(7), nn.ReLU()))
        self.actions = nn.Linear(7, ACTIONS)

    def forward(self, video: Tensor) -> Tensor:
        for stage in self.stages:
            video = stage(video)
        return self.actions(video.mean(dim=2))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["video"]), batch["action"])


def videos(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "video": torch.randn(12, CHANNELS, FRAMES, generator=generator)
        * (1 + torch.rand(12, 1, 1, generator=generator)),
        "action": torch.randint(ACTIONS, (12,), generator=generator),
    }


def parallelize(model: VideoNet, nodes: int, per_node: int) -> VideoNet:
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    for module in model.modules():
        if isinstance(module, CrossRankNorm):
            module.group = mesh.get_group("shard")
    for stage in model.stages:
        fully_shard(stage, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model, shard, rank):
    video_net = parallelize(model, rank.nodes, rank.local_world_size)
    loss(video_net, shard).backward()


case = Case(model=VideoNet, batch=videos, loss=loss, layout="2x2")
