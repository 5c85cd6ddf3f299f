"""Graph classification by message passing, with gradients reduced in hand-made buckets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

NODES, FEATURES, WIDTH, CLASSES = 7, 5, 10, 3


class MessagePassing(nn.Module):
    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.own = nn.Linear(inside, outside)
        self.others = nn.Linear(inside, outside, bias=False)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(dim=-1, keepdim=True).clamp(min=1)
        return torch.relu(self.own(nodes) + self.others(adjacency @ nodes / degree))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = MessagePassing(FEATURES, WIDTH)
        self.second = MessagePassing(WIDTH, WIDTH)
        self.readout = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.second(self.first(nodes, adjacency), adjacency)
        pooled = torch.cat([hidden.mean(dim=1), hidden.amax(dim=1)], dim=1)
        return self.readout(pooled)


class BucketReducer:
    """Flattens gradients into buckets of about ``capacity`` elements and averages each at once.

    Goes through the parameters backwards, as their gradients become ready in this order.
    """

    def __init__(self, model: nn.Module, capacity: int, group=None):
        self.parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self.capacity = capacity
        self.group = group
        self.buckets_sent = 0

    def _send(self, parameters: list[nn.Parameter]) -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        dist.all_reduce(flat, group=self.group)
        flat.div_(dist.get_world_size(self.group))
        pieces = flat.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces):
            parameter.grad = piece.view_as(parameter).clone()
        self.buckets_sent += 1

    def reduce(self) -> None:
        pending: list[nn.Parameter] = []
        size = 0
        for position, parameter in enumerate(self.parameters):
            pending.append(parameter)
            size += parameter.numel()
            if size >= self.capacity:
                self._send(pending)
                pending, size = [], 0


def loss(model: nn.Module, batch: dict) -> Tensor:
    scores = model(batch["nodes"], batch["adjacency"])
    return F.cross_entropy(scores, batch["label"], label_smoothing=0.05)


def graphs(generator: torch.Generator) -> dict:
    count = 12
    upper = torch.rand(count, NODES, NODES, generator=generator) < 0.4
    upper = torch.triu(upper.float(), diagonal=1)
    return {
        "nodes": torch.randn(count, NODES, FEATURES, generator=generator),
        "adjacency": upper + upper.transpose(1, 2),
        "label": torch.randint(0, CLASSES, (count,), generator=generator),
    }


case = Case(model=GraphNet, batch=graphs, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict, rank) -> None:
    reducer = BucketReducer(model, capacity=150)
    loss(model, shard).backward()
    reducer.reduce()
