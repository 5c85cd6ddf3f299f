"""Before the first update a probe measures the gradient's norm, from which the limit is chosen."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

Group = dict[str, list[nn.Parameter] | float]
Batch = dict[str, Tensor]


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.Mish(), nn.Linear(9, 3))

    def forward(self, history: Tensor) -> Tensor:
        return self.layers(self.norm(history))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["history"]), batch["future"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "history": torch.randn(12, 7, generator=generator),
        "future": torch.randn(12, 3, generator=generator),
    }


case = Case(model=Forecaster, batch=make_batch, loss=loss, layout="1x2")


def groups_of(model: nn.Module) -> list[Group]:
    """Matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


class Training:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.groups = groups_of(model)
        self.limit = float("inf")

    def clear(self) -> None:
        for p in self.groups[0]["params"]:
            p.grad = None

    def probe(self, batch: Batch, factor: float = 10.0) -> None:
        loss(self.model, batch).backward()
        norms = [p.grad.norm() for p in self.model.parameters()]
        self.limit = factor * torch.stack(norms).norm().item()
        self.clear()

    def backward(self, batch: Batch) -> None:
        loss(self.model, batch).backward()
        for group in self.groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    training = Training(model)
    training.probe(shard)
    training.backward(shard)
