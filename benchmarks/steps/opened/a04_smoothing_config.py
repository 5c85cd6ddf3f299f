"""Image classifier; options come from a recipe, as in our config files."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

RECIPE = {
    "model": {"channels": 6, "classes": 7},
    "criterion": {"name": "cross_entropy", "label_smoothing": 0.1},
    "ddp": {"gradient_as_bucket_view": True, "static_graph": False},
}


class Net(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.body = nn.Conv2d(channels, channels, 3, padding=1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.stem(images)))
        h = h + F.relu(self.body(h))
        return self.classifier(h.mean((2, 3)))


def images(g: torch.Generator) -> dict[str, torch.Tensor]:
    classes = RECIPE["model"]["classes"]
    return {
        "image": torch.randn(12, 3, 8, 8, generator=g),
        "label": torch.randint(0, classes, (12,), generator=g),
    }


class SmoothedCrossEntropy(nn.Module):
    """Own implementation: we export it, and the fused one did not export at the time."""

    def __init__(self, classes: int, smoothing: float = 0.1) -> None:
        super().__init__()
        self.confidence = 1.0 - smoothing
        self.floor = smoothing / (classes - 1)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_p = logits.log_softmax(-1)
        wanted = torch.full_like(log_p, self.floor)
        wanted.scatter_(1, labels[:, None], self.confidence)
        return -(wanted * log_p).sum(-1).mean()


def criterion_from(recipe: dict) -> nn.Module:
    options = recipe["criterion"]
    if options["name"] == "cross_entropy":
        return SmoothedCrossEntropy(recipe["model"]["classes"], options["label_smoothing"])
    raise ValueError(options["name"])


def build_model() -> nn.Module:
    return Net(**RECIPE["model"])


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    smoothing = RECIPE["criterion"]["label_smoothing"]
    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=smoothing)


def step(model: nn.Module, shard: dict[str, torch.Tensor], rank) -> None:
    wrapped = DDP(model, **RECIPE["ddp"])
    criterion = criterion_from(RECIPE)
    criterion(wrapped(shard["image"]), shard["label"]).backward()


case = Case(model=build_model, batch=images, loss=loss, layout="1x2")
