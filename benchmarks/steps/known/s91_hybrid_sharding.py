"""Hybrid sharding: parameters are sharded inside a node, and replicated over the nodes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case, Rank

WIDTH = 8
CLASSES = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 12)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x_norm = self.norm(x)
        return x + self.down(F.silu(self.gate(x_norm)) * self.up(x_norm))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(3)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "input": torch.randn(16, 5, generator=generator),
        "label": torch.randint(0, CLASSES, (16,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="2x2")


class Parallelism:
    """The mesh of a job, with one row for each node."""

    def __init__(self, rank: Rank) -> None:
        shape = (rank.nodes, rank.local_world_size)
        self.mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("replicate", "shard"))

    @property
    def data(self) -> DeviceMesh:
        return self.mesh["replicate", "shard"]

    @property
    def inside_node(self) -> DeviceMesh:
        return self.mesh["shard"]

    def apply(self, model: Classifier) -> nn.Module:
        last = str(len(model.layers) - 1)
        for name, layer in model.layers.items():
            fully_shard(layer, mesh=self.data, reshard_after_forward=name != last)
        fully_shard(model.head, mesh=self.inside_node, reshard_after_forward=False)
        return fully_shard(model, mesh=self.data)


def gathered(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def step(model: Classifier, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    sharded = Parallelism(rank).apply(model)
    loss(sharded, shard).backward()
    return {name: gathered(p.grad) for name, p in sharded.named_parameters()}
