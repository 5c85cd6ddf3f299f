"""Click-through prediction with a factorization machine, trained by a small hand-made trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FIELDS, VOCABULARY, WIDTH = 5, 40, 6
STEPS = 3


@dataclass(frozen=True)
class Settings:
    lr: float = 0.3
    momentum: float = 0.9
    max_norm: float = 0.05


class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.linear = nn.Embedding(VOCABULARY, 1)
        self.factors = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, fields: Tensor) -> Tensor:
        vectors = self.factors(fields)
        pairs = vectors.sum(1).square().sum(-1) - vectors.square().sum((1, 2))
        return self.bias + self.linear(fields).sum((1, 2)) + 0.5 * pairs


def clicks(generator: torch.Generator) -> dict[str, Tensor]:
    rows = 8 * STEPS
    return {
        "fields": torch.randint(0, VOCABULARY, (rows, FIELDS), generator=generator),
        "clicked": torch.randint(0, 2, (rows,), generator=generator).double(),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["fields"]), batch["clicked"])


def make_optimizer(parameters, settings: Settings = Settings()):
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, nesterov=True)


class Trainer:
    def __init__(self, model: nn.Module, rank) -> None:
        self.model = model
        self.settings = Settings()
        self.world = rank.world_size
        self.optimizer = make_optimizer(list(model.parameters()))

    def synchronise(self) -> None:
        """Averages the gradients over all ranks, one parameter at a time."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world

    def __call__(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        self.synchronise()
        self.optimizer.step()


case = Case(model=FactorizationMachine, batch=clicks, loss=loss, layout="1x2")
step = Trainer
options = {
    "compare": "update",
    "steps": STEPS,
    "optimizer": lambda parameters: make_optimizer(parameters),
    "clip": Settings.max_norm,
}
