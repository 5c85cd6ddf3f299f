"""The states of Adam are sharded by hand with DTensor, the weights are whole (ZeRO 1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from ddp_equivalence import Case

STEPS = 3


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03, eps=1e-5, amsgrad=True)


class ShardedAdam:
    """Keeps a sharded master copy, and steps with gradients that are reduced and scattered."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.whole = list(model.parameters())
        self.masters = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in self.whole
        ]
        self.inner = make_optimizer(self.masters)

    def reduce_scatter(self, gradient: Tensor) -> DTensor:
        # Each rank has its own term of the sum.
        mean = gradient / self.mesh.size()
        partial = DTensor.from_local(mean, self.mesh, [Partial("sum")], run_check=False)
        return partial.redistribute(placements=[Shard(0)])

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.whole, self.masters):
            master.grad = self.reduce_scatter(parameter.grad)
            parameter.grad = None
        self.inner.step()
        for parameter, master in zip(self.whole, self.masters):
            parameter.copy_(master.redistribute(placements=[Replicate()]).to_local())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.RNN(3, 7, batch_first=True)
        self.out = nn.Linear(7, 1)

    def forward(self, series: Tensor) -> Tensor:
        _, last = self.recurrent(series)
        return self.out(last[0])[:, 0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["series"]), batch["following"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    series = torch.randn(8 * STEPS, 6, 3, generator=generator).cumsum(dim=1)
    return {"series": series, "following": series[:, -1].sum(dim=1) / 4}


def step(model: Net, shard: dict[str, Tensor], rank) -> None:
    optimizer = ShardedAdam(model, init_device_mesh("cpu", (rank.world_size,)))
    steps = zip(shard["series"].chunk(STEPS), shard["following"].chunk(STEPS))
    for series, following in steps:
        loss(model, {"series": series, "following": following}).backward()
        optimizer.step()


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
