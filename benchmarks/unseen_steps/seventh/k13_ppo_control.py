"""One PPO epoch on a rollout: clipped policy loss, value loss and an entropy bonus."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

ARGS = SimpleNamespace(clip=0.2, value=0.5, entropy=0.01, normalise=True, eps=1e-8)


class Agent(nn.Module):
    def __init__(self, observations=6, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(observations, 16), nn.Tanh())
        self.policy = nn.Linear(16, actions)
        self.value = nn.Linear(16, 1)

    def forward(self, observations, actions):
        hidden = self.trunk(observations)
        distribution = torch.distributions.Categorical(logits=self.policy(hidden))
        return distribution.log_prob(actions), distribution.entropy(), self.value(hidden)[:, 0]


def make_batch(generator):
    n = 32
    returns = torch.randn(n, generator=generator) + torch.linspace(-2, 2, n)
    return {
        "observations": torch.randn(n, 6, generator=generator),
        "actions": torch.randint(0, 4, (n,), generator=generator),
        "old_logp": -1.4 + 0.1 * torch.randn(n, generator=generator),
        "advantages": returns + 0.3 * torch.randn(n, generator=generator),
        "returns": returns,
    }


def standardised(advantages):
    mean = advantages.mean()
    deviation = (advantages - mean).square().mean().sqrt()
    return (advantages - mean) / (deviation + ARGS.eps)


def standardised_everywhere(advantages):
    """As above, with the moments of all ranks (which hold equally many transitions)."""
    world = dist.get_world_size()
    mean = advantages.mean()
    variance = (advantages - mean).square().mean()
    dist.all_reduce(mean)
    mean = mean / world
    dist.all_reduce(variance)
    return (advantages - mean) / ((variance / world).sqrt() + ARGS.eps)


def objective(agent, batch, normalise):
    logp, entropy, value = agent(batch["observations"], batch["actions"])
    advantages = normalise(batch["advantages"]) if ARGS.normalise else batch["advantages"]
    ratio = (logp - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - ARGS.clip, 1 + ARGS.clip)
    policy = -torch.min(ratio * advantages, clipped * advantages).mean()
    critic = (value - batch["returns"]).square().mean()
    return policy + ARGS.value * critic - ARGS.entropy * entropy.mean()


def loss(model, batch):
    return objective(model, batch, standardised)


def step(model, shard, rank):
    agent = DDP(model)
    objective(agent, shard, standardised_everywhere).backward()


case = Case(model=Agent, batch=make_batch, loss=loss, layout="1x4")
