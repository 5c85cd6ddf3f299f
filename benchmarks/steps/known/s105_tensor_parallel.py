"""Ranks of a node split the hidden units of a block; nodes have different examples."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ddp_equivalence import Case, Rank

HIDDEN = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.up = nn.Linear(6, HIDDEN)
        self.down = nn.Linear(HIDDEN, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(x + self.down(F.gelu(self.up(x))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(12, 5, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (12,), generator=generator)}


case = Case(model=Net, batch=make_batch, loss=loss, layout="2x2", shards="own")


class EnterSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LeaveSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def forward(model: Net, x: Tensor, mesh: DeviceMesh) -> Tensor:
    group = mesh.get_group("tensor")
    mine = torch.arange(HIDDEN).chunk(mesh["tensor"].size())[mesh.get_local_rank("tensor")]
    x = torch.tanh(model.stem(x))
    inner = F.gelu(F.linear(EnterSplit.apply(x, group), model.up.weight[mine], model.up.bias[mine]))
    partial = F.linear(inner, model.down.weight[:, mine], model.down.bias)
    return model.head(x + LeaveSplit.apply(partial, group))


def reduce_gradients(model: Net, mesh: DeviceMesh) -> None:
    split = {model.up.weight, model.up.bias, model.down.weight}
    for p in model.parameters():
        if p in split:
            dist.all_reduce(p.grad, group=mesh.get_group("tensor"))
        dist.all_reduce(p.grad, group=mesh.get_group("data"))
        p.grad /= mesh["data"].size()


def step(model: Net, shard: dict[str, Tensor], rank: Rank) -> None:
    shape = (rank.nodes, rank.local_world_size)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("data", "tensor"))
    batch = {key: value.chunk(rank.nodes)[rank.node] for key, value in shard.items()}
    F.cross_entropy(forward(model, batch["x"], mesh), batch["y"]).backward()
    reduce_gradients(model, mesh)
