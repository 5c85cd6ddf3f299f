"""Continues training of a deep model, with the modules frozen that the configuration names."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

WORDS, WIDTH, DEPTH, CLASSES = 15, 5, 12, 4

Batch = tuple[Tensor, Tensor]


@dataclass
class Settings:
    freeze: list[str] = field(default_factory=lambda: ["embed", "layers.1"])
    bucket_mb: int = 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(self.norm(x)))


class DeepModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def partly_trained() -> nn.Module:
    """The model of the big batch: the embedding and the second layer stay as they are."""
    model = DeepModel()
    model.embed.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


def loss(model: nn.Module, batch: Batch) -> Tensor:
    words, classes = batch
    return F.cross_entropy(model(words), classes)


def make_batch(generator: torch.Generator) -> Batch:
    words = torch.randint(0, WORDS, (12, 6), generator=generator)
    return words, torch.randint(0, CLASSES, (12,), generator=generator)


case = Case(model=partly_trained, batch=make_batch, loss=loss, layout="1x2")


class ContinuedTraining:
    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        model.requires_grad_(True)
        for name, parameter in model.named_parameters():
            if self.is_frozen(name):
                parameter.requires_grad_(False)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_mb)

    def is_frozen(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self.settings.freeze)

    def train_step(self, batch: Batch) -> float:
        value = loss(self.ddp, batch)
        value.backward()
        return value.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ContinuedTraining(model, Settings()).train_step(shard)
