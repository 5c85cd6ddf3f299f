"""FSDP for an image classifier: big weights are sharded, and small ones are kept whole.

To gather a few numbers costs as much latency as to gather a matrix, so we do not shard them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case, Rank


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        h = self.narrow(F.gelu(self.widen(h))) * self.layer_scale
        return x + h.permute(0, 3, 1, 2)


class Classifier(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.ModuleList(ConvNextBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(16, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 10, (16,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x4")


class Sharding:
    """What is sharded, and over which ranks."""

    def __init__(self, mesh: DeviceMesh, model: nn.Module, smallest: int) -> None:
        self.mesh = mesh
        self.whole = {p for p in model.parameters() if p.numel() < smallest}

    def wrap(self, module: nn.Module) -> nn.Module:
        return fully_shard(module, mesh=self.mesh, ignored_params=self.whole)


def shard_model(model: Classifier, rank: Rank) -> nn.Module:
    sharding = Sharding(init_device_mesh(rank.device.type, (rank.world_size,)), model, smallest=16)
    for block in model.blocks:
        sharding.wrap(block)
    return sharding.wrap(model)


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def step(model: Classifier, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    sharded = shard_model(model, rank)
    loss(sharded, shard).backward()
    return {name: full(p.grad) for name, p in sharded.named_parameters()}
