"""2-D parallelism with a DataLoader: each replica reads its own part of the data set."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case

FEATURES, WIDTH, CLASSES = 6, 8, 3


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.left(x) * self.right(x))


class Parallelism:
    def __init__(self, data: int, tensor: int) -> None:
        self.mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))

    @property
    def data_mesh(self) -> DeviceMesh:
        return self.mesh["data"]

    def apply(self, model: TwoTowers) -> nn.Module:
        for tower in (model.left, model.right):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(tower, self.mesh["tensor"], plan)
            fully_shard(tower, mesh=self.data_mesh)
        return fully_shard(model, mesh=self.data_mesh)

    def loader(self, dataset: TensorDataset) -> Iterator[tuple[Tensor, ...]]:
        sampler = DistributedSampler(
            dataset,
            num_replicas=dist.get_world_size(), rank=dist.get_rank(),
            shuffle=False,
        )
        return iter(DataLoader(dataset, batch_size=len(sampler), sampler=sampler))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(24, FEATURES, generator=generator)
    return {"x": x, "label": (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()}


def step(model: TwoTowers, batch: dict[str, Tensor], rank) -> None:
    parallelism = Parallelism(data=rank.nodes, tensor=rank.world_size // rank.nodes)
    parallel = parallelism.apply(model)
    dataset = TensorDataset(batch["x"], batch["label"])
    x, label = next(parallelism.loader(dataset))
    loss(parallel, {"x": x, "label": label}).backward()


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="2x2", shards="own")
