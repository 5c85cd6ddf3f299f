"""Node classification on small graphs: ranks have different numbers of labelled nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

GRAPHS, NODES, FEATURES, LABELS = 8, 7, 5, 3


class GraphConv(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.own = nn.Linear(n_in, n_out)
        self.neighbours = nn.Linear(n_in, n_out, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = edges.sum(-1, keepdim=True).clamp(min=1)
        return self.own(x) + self.neighbours(edges @ x / degree)


class GNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GraphConv(FEATURES, 8)
        self.second = GraphConv(8, LABELS)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


def graphs(generator: torch.Generator) -> dict[str, Tensor]:
    edges = torch.rand(GRAPHS, NODES, NODES, generator=generator) < 0.4
    labelled = torch.tensor([1, 2, 1, 2, 5, 6, 4, 7])
    y = torch.randint(0, LABELS, (GRAPHS, NODES), generator=generator)
    return {
        "x": torch.randn(GRAPHS, NODES, FEATURES, generator=generator),
        "edges": (edges | edges.transpose(1, 2)).double(),
        "y": y.masked_fill(torch.arange(NODES)[None] >= labelled[:, None], -1),
    }


def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    logits = model(b["x"], b["edges"].to(b["x"]))
    return F.cross_entropy(logits.flatten(0, 1), b["y"].flatten(), ignore_index=-1)


case = Case(model=GNN, batch=graphs, loss=loss, layout="1x2")


def loss_scale(labelled: Tensor, base: int = 64) -> float:
    """This rank's nodes relative to the average rank, in fixed point so that all ranks agree."""
    total = labelled.clone()
    dist.all_reduce(total)
    per_rank = total // dist.get_world_size()
    return (labelled * base // per_rank).item() / base


def train_step(ddp: nn.Module, b: dict[str, Tensor]) -> float:
    value = loss(ddp, b)
    scale = loss_scale((b["y"] >= 0).sum())
    (value * scale).backward()
    return value.item()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    train_step(DistributedDataParallel(model), shard)
