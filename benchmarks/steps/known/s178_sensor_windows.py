"""Recognises activities in windows of sensor data, with a small transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

SENSORS, TIMES, WIDTH, HEADS, ACTIVITIES = 6, 9, 8, 2, 5


class Layer(nn.Module):
    """Attention between the times of a window, and a perceptron for each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.perceptron(self.second_norm(x))


class ActivityModel(nn.Module):
    """Windows of shape (windows, times, sensors)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(SENSORS, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(TIMES, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, ACTIVITIES)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embed(windows) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["windows"]), batch["activity"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "windows": torch.randn(12, TIMES, SENSORS, generator=generator),
        "activity": torch.randint(ACTIVITIES, (12,), generator=generator),
    }


case = Case(model=ActivityModel, batch=make_batch, loss=loss, layout="1x3")


class Trainer:
    def __init__(self, model: nn.Module, learning_rate: float = 3e-4) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 100)
        )

    def train_step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss(self.model, batch).backward()
        self.optimizer.step()
        self.schedule.step()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model).train_step(shard)
