"""Matrices have their gradients partitioned over the ranks, vectors keep theirs; then clipping."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

MAX_NORM = 0.8

Batch = dict[str, Tensor]


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randn(16, 2, generator=generator),
    }


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1x4")


class PartitionedGradients:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.named = dict(model.named_parameters())
        self.rank, self.world_size = rank.rank, rank.world_size
        self.parts: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}

    def reduce(self) -> None:
        for name, parameter in self.named.items():
            mean = parameter.grad.detach().flatten() / self.world_size
            dist.all_reduce(mean)
            if parameter.dim() > 1:
                padded = F.pad(mean, (0, -len(mean) % self.world_size))
                self.parts[name] = padded.chunk(self.world_size)[self.rank].clone()
            else:
                self.whole[name] = mean
            parameter.grad = None

    def norm(self) -> Tensor:
        """The norm of all gradients of the model, whoever holds them."""
        squares = [value.square().sum() for value in (*self.parts.values(), *self.whole.values())]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def clip(self, max_norm: float) -> None:
        factor = (max_norm / (self.norm() + 1e-6)).clamp(max=1.0)
        for value in (*self.parts.values(), *self.whole.values()):
            value.mul_(factor)

    def gathered(self) -> dict[str, Tensor]:
        """The gradients by name, as they go into a checkpoint."""
        result = {}
        for name, parameter in self.named.items():
            flat = self.whole.get(name)
            if flat is None:
                parts = [torch.empty_like(self.parts[name]) for _ in range(self.world_size)]
                dist.all_gather(parts, self.parts[name])
                flat = torch.cat(parts)[: parameter.numel()]
            result[name] = flat.view_as(parameter)
        return result


def step(model: nn.Module, shard: Batch, rank: Rank) -> dict[str, Tensor]:
    loss(model, shard).backward()
    gradients = PartitionedGradients(model, rank)
    gradients.reduce()
    gradients.clip(MAX_NORM)
    return gradients.gathered()
