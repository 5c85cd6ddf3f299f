"""A generator and a critic, which are trained in the same round with one reduction for both.

Both optimizers step after the round, on gradients that were averaged over the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ddp_equivalence import Case, Rank

NOISE, DATA = 4, 6


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 10), nn.Tanh(), nn.Linear(10, DATA))
        self.critic = nn.Sequential(nn.Linear(DATA, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1))


def critic_loss(model: Players, real: Tensor, noise: Tensor) -> Tensor:
    fake = model.generator(noise).detach()
    return F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake)).mean()


def generator_loss(scores: Tensor) -> Tensor:
    return F.softplus(-scores).mean()


def loss(model: Players, batch: dict[str, Tensor]) -> Tensor:
    """What both players minimise. The critic is a constant for the generator."""
    constant = {name: p.detach() for name, p in model.critic.named_parameters()}
    scores = functional_call(model.critic, constant, (model.generator(batch["noise"]),))
    return critic_loss(model, batch["real"], batch["noise"]) + generator_loss(scores)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "real": 1 + torch.randn(16, DATA, generator=generator),
        "noise": torch.randn(16, NOISE, generator=generator),
    }


case = Case(model=Players, batch=make_batch, loss=loss, layout="1x2")


class Game:
    """One round of the game on one rank."""

    def __init__(self, model: Players, rank: Rank) -> None:
        self.model, self.rank = model, rank
        self.optimizers = [
            torch.optim.Adam(model.generator.parameters(), lr=1e-4, betas=(0.5, 0.9)),
            torch.optim.Adam(model.critic.parameters(), lr=4e-4, betas=(0.5, 0.9)),
        ]

    def train_critic(self, batch: dict[str, Tensor]) -> None:
        critic_loss(self.model, batch["real"], batch["noise"]).backward()

    def train_generator(self, batch: dict[str, Tensor]) -> None:
        scores = self.model.critic(self.model.generator(batch["noise"]))
        generator_loss(scores).backward()

    def reduce(self) -> None:
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.rank.world_size)

    def play(self, batch: dict[str, Tensor]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.train_critic(batch)
        self.train_generator(batch)
        self.reduce()
        for optimizer in self.optimizers:
            optimizer.step()


def step(model: Players, shard: dict[str, Tensor], rank: Rank) -> None:
    Game(model, rank).play(shard)
