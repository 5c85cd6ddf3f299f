"""River levels: after every step a held-out part is evaluated, and the rate follows its error."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STEPS, ROWS, GAUGES = 4, 8, 5

Batch = dict[str, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(GAUGES, 8), nn.Tanh(), nn.Linear(8, 1))


def levels(generator: torch.Generator) -> Batch:
    rows = ROWS * STEPS
    return {
        "gauges": torch.randn(rows, GAUGES, generator=generator),
        "level": torch.randn(rows, 1, generator=generator),
        "held_out_gauges": torch.randn(rows, GAUGES, generator=generator),
        "held_out_level": 2 * torch.randn(rows, 1, generator=generator),
    }


class Evaluator:
    """The mean squared error on the held-out rows."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, batch: Batch) -> float:
        self.model.eval()
        error = F.mse_loss(self.model(batch["held_out_gauges"]), batch["held_out_level"])
        self.model.train()
        return self.reduce(error).item()

    def reduce(self, error: Tensor) -> Tensor:
        return error


class EvaluatorOnRanks(Evaluator):
    def reduce(self, error: Tensor) -> Tensor:
        """The figure for the log, which rank 0 writes."""
        total = error.clone()
        dist.reduce(total, dst=0)
        return total / dist.get_world_size() if dist.get_rank() == 0 else error


class FollowsError:
    """Callback: a learning rate in proportion to the error, relative to the first one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.base = optimizer.param_groups[0]["lr"]
        self.first: float | None = None

    def on_validation(self, error: float) -> None:
        self.first = self.first or error
        self.optimizer.param_groups[0]["lr"] = self.base * (error / self.first) ** 2


def trainer(model: nn.Module, evaluate: Callable[[Batch], float]) -> Callable[[Batch], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    callbacks = [FollowsError(optimizer)]

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch["gauges"]), batch["level"]).backward()
        optimizer.step()
        error = evaluate(batch)
        for callback in callbacks:
            callback.on_validation(error)

    return train


def in_one_process(model: nn.Module) -> Callable[[Batch], None]:
    return trainer(model, Evaluator(model))


def step(model: nn.Module, rank) -> Callable[[Batch], None]:
    return trainer(DistributedDataParallel(model), EvaluatorOnRanks(model))


case = Case(model=build_model, batch=levels, layout="1x2")
options = {"compare": "update", "steps": STEPS, "reference": in_one_process}
