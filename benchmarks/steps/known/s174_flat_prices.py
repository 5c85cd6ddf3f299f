"""Predicts the prices of flats with a Huber loss, from numbers and the district."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

DISTRICTS, NUMBERS, DELTA = 6, 5, 0.7

Batch = dict[str, Tensor]


class PriceModel(nn.Module):
    """A perceptron on standardised numbers and the embedding of the district."""

    def __init__(self) -> None:
        super().__init__()
        self.district = nn.Embedding(DISTRICTS, 3)
        self.layers = nn.Sequential(
            nn.Linear(NUMBERS + 3, 12),
            nn.LayerNorm(12),
            nn.ReLU(),
            nn.Linear(12, 1),
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(torch.cat([batch["numbers"], self.district(batch["district"])], dim=1))


class HuberLoss(nn.Module):
    """Quadratic for small errors, and linear for errors above delta."""

    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, prices: Tensor, targets: Tensor) -> Tensor:
        error = (prices - targets).abs()
        small = 0.5 * error.square()
        large = self.delta * (error - 0.5 * self.delta)
        return torch.where(error <= self.delta, small, large).mean()


criterion = HuberLoss(DELTA)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch), batch["log_price"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "numbers": torch.randn(16, NUMBERS, generator=generator),
        "district": torch.randint(DISTRICTS, (16,), generator=generator),
        "log_price": torch.randn(16, generator=generator),
    }


case = Case(model=PriceModel, batch=make_batch, loss=loss, layout="2x2")


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def train_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    average_gradients(model)
    optimizer.step()
    return value.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_step(model, shard, optimizer)
