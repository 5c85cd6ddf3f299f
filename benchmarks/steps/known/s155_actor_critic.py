"""An actor-critic update with DDP that also records how strongly each part pulls."""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

ACTIONS = 4
VALUE_WEIGHT, ENTROPY_WEIGHT = 0.5, 0.02
Batch = dict[str, Tensor]


class ActorCritic(nn.Module):
    """One trunk; logits of the actions and the value of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.actor = nn.Linear(16, ACTIONS)
        self.critic = nn.Linear(16, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(states)
        return self.actor(features), self.critic(features).squeeze(-1)


def parts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What is earned, with the critic's error; and how far the policy is from uniform."""
    logits, values = model(batch["states"])
    policy = Categorical(logits=logits)
    advantages = batch["returns"] - values.detach()
    actor_loss = -(policy.log_prob(batch["actions"]) * advantages).mean()
    critic_loss = F.mse_loss(values, batch["returns"])
    return actor_loss + VALUE_WEIGHT * critic_loss, -ENTROPY_WEIGHT * policy.entropy().mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return sum(parts(model, batch))


def make_batch(generator: torch.Generator) -> Batch:
    states = torch.randn(20, 6, generator=generator)
    return {
        "states": states,
        "actions": torch.randint(ACTIONS, (20,), generator=generator),
        "returns": states.mean(1) + 0.5 * torch.randn(20, generator=generator),
    }


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x4")


class Diary:
    """Lengths of the gradient, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lengths: dict[str, float] = {}

    def note(self, name: str) -> None:
        squares = [p.grad.square().sum() for p in self.model.parameters() if p.grad is not None]
        self.lengths[name] = float(torch.stack(squares).sum().sqrt())


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    diary = Diary(model)
    earned, uniform = parts(ddp, shard)
    earned.backward(retain_graph=True)
    diary.note("without entropy")
    uniform.backward()
    diary.note("all")
