"""Tensor-parallel linear layers with a norm of the gradients over all ranks of a node."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, HIDDEN, OUT = 6, 12, 4
LEARNING_RATE, MAX_NORM = 0.3, 0.2


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))
        self.up = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(x * self.scale)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Groups:
    """Ranks of one node share a copy of the weights, and equal local ranks share a part."""

    def __init__(self, nodes: int, per_node: int) -> None:
        table = torch.arange(nodes * per_node).view(nodes, per_node)
        self.tensor, _ = dist.new_subgroups_by_enumeration(table.tolist())
        self.data, _ = dist.new_subgroups_by_enumeration(table.t().tolist())


class TensorParallel(nn.Module):
    def __init__(self, whole: Reference, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        part, parts = dist.get_rank(groups.tensor), dist.get_world_size(groups.tensor)
        self.scale = nn.Parameter(whole.scale.detach().clone())
        self.up = nn.Parameter(whole.up.weight.detach().chunk(parts, dim=0)[part].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(parts, dim=1)[part].clone())
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        for parameter in (self.up, self.down):
            parameter.tensor_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(torch.sin(F.linear(x * self.scale, self.up)), self.down)
        return all_reduce(y, group=self.groups.tensor) + self.bias

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        parts = dist.get_world_size(self.groups.tensor)
        # The backward of the all-reduce has added up equal gradients.
        for parameter in (self.scale, self.up, self.down):
            parameter.grad /= parts
        dist.all_reduce(self.scale.grad, group=self.groups.tensor)
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.groups.data)
            parameter.grad /= dist.get_world_size(self.groups.data)

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        counted = [p.grad for p in self.parameters()]
        squares = torch.stack([gradient.square().sum() for gradient in counted]).sum()
        dist.all_reduce(squares, group=self.groups.tensor)
        coefficient = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1)
        for parameter in self.parameters():
            parameter.grad *= coefficient

    def gathered(self) -> dict[str, Tensor]:
        def join(tensor: Tensor, dim: int) -> Tensor:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.groups.tensor))]
            dist.all_gather(parts, tensor.detach().contiguous(), group=self.groups.tensor)
            return torch.cat(parts, dim)

        return {"scale": self.scale.detach(), "up.weight": join(self.up, 0),
                "down.weight": join(self.down, 1), "down.bias": self.bias.detach()}


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(16, FEATURES, generator=generator)
    return {"x": x, "y": 2 * x[:, :OUT] - x[:, 2:]}


def step(model: Reference, batch: dict[str, Tensor], rank) -> dict[str, Tensor]:
    groups = Groups(rank.nodes, rank.world_size // rank.nodes)
    parallel = TensorParallel(model, groups)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=LEARNING_RATE)
    loss(parallel, {name: t.chunk(rank.nodes)[rank.node] for name, t in batch.items()}).backward()
    parallel.reduce_gradients()
    parallel.clip(MAX_NORM)
    optimizer.step()
    return parallel.gathered()


case = Case(model=Reference, batch=make_batch, loss=loss, layout="2x2", shards="own")
options = {"compare": "update", "lr": LEARNING_RATE, "clip": MAX_NORM}
