"""A critic between real and generated samples, with a penalty on the slope at points between."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

PENALTY = 10.0
DRIFT = 1e-2


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 12), nn.Softplus())
        self.out = nn.Linear(12, 1)

    def forward(self, samples: Tensor) -> Tensor:
        return self.out(self.body(samples)).squeeze(1)


class Objective:
    """What the critic minimises, with its parts for the log."""

    def __init__(self, penalty: float = PENALTY, drift: float = DRIFT) -> None:
        self.penalty = penalty
        self.drift = drift
        self.parts: dict[str, float] = {}

    def slope_penalty(self, scores: Tensor, points: Tensor) -> Tensor:
        """The mean squared distance of the slope from one."""
        (slopes,) = torch.autograd.grad(scores.mean(), points, create_graph=True)
        return (slopes.norm(dim=1) - 1).square().mean()

    def __call__(self, critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        real, fake = batch["real"], batch["fake"]
        points = torch.lerp(fake, real, batch["between"][:, None]).requires_grad_()
        scores = critic(torch.cat([real, fake, points]))
        on_real, on_fake, on_points = scores.chunk(3)
        parts = {
            "distance": on_fake.mean() - on_real.mean(),
            "penalty": self.penalty * self.slope_penalty(on_points, points),
            "drift": self.drift * on_real.square().mean(),
        }
        self.parts = {name: float(value.detach()) for name, value in parts.items()}
        return parts["distance"] + parts["penalty"] + parts["drift"]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return Objective()(model, batch)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "real": torch.randn(16, 6, generator=generator) + 1,
        "fake": torch.randn(16, 6, generator=generator),
        "between": torch.rand(16, generator=generator),
    }


case = Case(model=Critic, batch=make_batch, loss=loss, layout="1x4")


class CriticTrainer:
    def __init__(self, critic: nn.Module) -> None:
        self.critic = DistributedDataParallel(critic)
        self.objective = Objective()
        self.log: list[dict[str, float]] = []

    def update(self, batch: dict[str, Tensor]) -> None:
        self.critic.zero_grad()
        self.objective(self.critic, batch).backward()
        self.log.append(self.objective.parts)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    CriticTrainer(model).update(shard)
