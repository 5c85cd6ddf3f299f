"""A value network trained with clipped SGD; the reference clips the big batch's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Hyper:
    lr: float = 0.05
    max_norm: float = 0.4
    transitions: int = 16
    obs: int = 5
    gamma: float = 0.97


hp = Hyper()


def value_net() -> nn.Module:
    return nn.Sequential(nn.Linear(hp.obs, 14), nn.Tanh(), nn.Linear(14, 1))


def replay(generator: torch.Generator) -> dict[str, Tensor]:
    priority = torch.linspace(0.2, 2.5, hp.transitions)
    return {
        "obs": torch.randn(hp.transitions, hp.obs, generator=generator),
        "nxt": torch.randn(hp.transitions, hp.obs, generator=generator),
        "rew": torch.randn(hp.transitions, generator=generator) * priority + priority,
        "done": torch.rand(hp.transitions, generator=generator) < 0.3,
    }


def td_error(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        bootstrap = hp.gamma * model(b["nxt"]).squeeze(-1) * ~b["done"]
    return (model(b["obs"]).squeeze(-1) - b["rew"] - bootstrap).pow(2).mean()


case = Case(model=value_net, batch=replay, loss=td_error, layout="1x2")


class InOneProcess:
    """The reference: clip, then a step of SGD."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr)

    def __call__(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        td_error(self.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), hp.max_norm)
        self.optimizer.step()


def mean_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Learner:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr)

    def gradients(self, batch: dict[str, Tensor]) -> None:
        td_error(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), hp.max_norm)
        mean_gradients(self.model)

    def __call__(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.gradients(batch)
        self.optimizer.step()


step = Learner
options = {"compare": "update", "reference": InOneProcess, "steps": 2}
