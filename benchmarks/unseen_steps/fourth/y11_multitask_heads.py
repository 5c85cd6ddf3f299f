"""One trunk, and a head for every task; an example belongs to one task."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

FEATURES, WIDTH, OUTPUTS, EXAMPLES = 6, 10, 3, 12
TASKS = ("depth", "normals", "albedo")

Batch = dict[str, Tensor]


class MultiTaskNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        self.heads = nn.ModuleDict({task: nn.Linear(WIDTH, OUTPUTS) for task in TASKS})

    def forward(self, features: Tensor, task: str) -> Tensor:
        return self.heads[task](self.trunk(features))


def depth_loss(prediction: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(prediction, target, reduction="none").mean(dim=1)


def normals_loss(prediction: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(prediction, target, dim=1)


def albedo_loss(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction, target, reduction="none").mean(dim=1)


CRITERIA = {"depth": depth_loss, "normals": normals_loss, "albedo": albedo_loss}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over examples; tasks without an example are not computed."""
    losses = []
    for number, task in enumerate(TASKS):
        chosen = batch["task"] == number
        if chosen.any():
            prediction = model(batch["features"][chosen], task)
            losses.append(CRITERIA[task](prediction, batch["target"][chosen]))
    return torch.cat(losses).mean()


def make_batch(generator: torch.Generator) -> Batch:
    """The data sets of the tasks are concatenated: the batch is ordered by task."""
    return {
        "features": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "target": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
        "task": torch.arange(EXAMPLES) * len(TASKS) // EXAMPLES,
    }


case = Case(model=MultiTaskNetwork, batch=make_batch, loss=loss, layout="1x3")


class GradientAverager:
    """Averages gradients over ranks after backward; knows nothing of the model's structure."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.world_size = world_size

    @torch.no_grad()
    def synchronise(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.world_size)


class MultiTaskTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.averager = GradientAverager(model, rank.world_size)

    def fit(self, batch: Batch) -> float:
        self.model.zero_grad(set_to_none=True)
        objective = loss(self.model, batch)
        objective.backward()
        self.averager.synchronise()
        return objective.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    MultiTaskTrainer(model, rank).fit(shard)
