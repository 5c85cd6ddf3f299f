"""Transfer learning: a new head and the last block are trained, and the stem stays as it is."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

BREEDS = 6


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.block = nn.Conv2d(6, 8, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return F.silu(self.block(F.silu(self.stem(images)))).mean(dim=(2, 3))


class Breeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, BREEDS))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


def build() -> Breeds:
    model = Breeds()
    model.backbone.stem.requires_grad_(False)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["breed"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(12, 3, 8, 8, generator=generator),
        "breed": torch.randint(BREEDS, (12,), generator=generator),
    }


case = Case(model=build, batch=make_batch, loss=loss, layout="1x2")


class FineTuner:
    """Trains what is not frozen."""

    def __init__(self, model: nn.Module, world_size: int, learning_rate: float) -> None:
        self.model = model
        self.world_size = world_size
        self.trained = filter(lambda p: p.requires_grad, model.parameters())
        self.optimizer = torch.optim.SGD(self.trained, lr=learning_rate, momentum=0.9)

    def average_gradients(self) -> None:
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size

    def train_step(self, batch: dict[str, Tensor]) -> float:
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.average_gradients()
        self.optimizer.step()
        return value.item()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    model.train()
    FineTuner(model, rank.world_size, learning_rate=0.02).train_step(shard)
