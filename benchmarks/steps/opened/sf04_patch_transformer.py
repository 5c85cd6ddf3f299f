"""A small vision transformer with hybrid sharding: sharded in a node, replicated over the nodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

PATCHES, PIXELS, WIDTH, HEADS, CLASSES = 6, 12, 8, 2, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0))
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.position = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["patches"]), batch["labels"], label_smoothing=0.1)


def some_images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "patches": torch.randn(16, PATCHES, PIXELS, generator=generator),
        "labels": torch.randint(CLASSES, (16,), generator=generator),
    }


class Parallelism:
    """Which ranks share what."""

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        names = ("replicate", "shard")
        self.mesh = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=names)

    def apply(self, model: VisionTransformer) -> VisionTransformer:
        for number, block in enumerate(model.blocks):
            # The last block is needed again at once in the backward.
            self.shard(block, self.mesh, reshard=number < len(model.blocks) - 1)
        self.shard(model, self.mesh["shard"], reshard=False)
        return model

    @staticmethod
    def shard(module: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def step(model, shard, rank):
    parallelism = Parallelism(rank.nodes, rank.local_world_size)
    loss(parallelism.apply(model), shard).backward()


case = Case(model=VisionTransformer, batch=some_images, loss=loss, layout="2x2")
