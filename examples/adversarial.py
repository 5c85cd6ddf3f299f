"""A generator and its critic, which no single loss trains: the reference is a function of its own.

ddp-equivalence check examples/adversarial.py
ddp-equivalence check examples/adversarial.py:TrainWithoutWrapper
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

EXAMPLES, NOISE, SIZE = 16, 4, 8

Batch = dict[str, Tensor]  # noise (examples, 4), real (examples, 8)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 16), nn.Tanh(), nn.Linear(16, SIZE))
        self.critic = nn.Sequential(nn.Linear(SIZE, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "noise": torch.randn(EXAMPLES, NOISE, generator=generator),
        "real": torch.randn(EXAMPLES, SIZE, generator=generator),
    }


class Alternating:
    """One step of the critic, then one of the generator, wherever the two modules come from."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        self.generator, self.critic = generator, critic
        self.of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
        self.of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def __call__(self, batch: Batch) -> None:
        self.of_critic.zero_grad()
        fake = self.generator(batch["noise"]).detach()
        real, fake = self.critic(batch["real"]), self.critic(fake)
        (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
        self.of_critic.step()
        self.of_generator.zero_grad()
        F.softplus(-self.critic(self.generator(batch["noise"]))).mean().backward()
        self.of_generator.step()


def in_one_process(model: Adversaries) -> Alternating:
    """The reference: the same two steps on one device with the big batch."""
    return Alternating(model.generator, model.critic)


class Train(Alternating):
    """Right: both modules are wrapped, once for all steps."""

    def __init__(self, model: Adversaries, rank: Rank) -> None:
        wrap = DistributedDataParallel
        super().__init__(wrap(model.generator), wrap(model.critic))


class TrainWithoutWrapper(Alternating):
    """Wrong: the critic is not wrapped, so each rank trains its own."""

    def __init__(self, model: Adversaries, rank: Rank) -> None:
        super().__init__(DistributedDataParallel(model.generator), model.critic)


case = Case(model=Adversaries, batch=make_batch, layout="1x2")
step = Train
options = {"compare": "update", "reference": in_one_process, "steps": 2}
