"""PPO with advantages that are normalised over the rollouts of all workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ROLLOUTS, OBSERVATION, ACTIONS = 24, 6, 4
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT, EPS = 0.2, 0.5, 0.01, 1e-8


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATION, 16), nn.Tanh())
        self.actor = nn.Linear(16, ACTIONS)
        self.critic = nn.Linear(16, 1)

    def forward(self, observation):
        hidden = self.body(observation)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden)[:, 0]


def make_batch(generator):
    trend = torch.linspace(-3, 3, ROLLOUTS)  # workers advance through the levels of the game
    return {
        "observation": torch.randn(ROLLOUTS, OBSERVATION, generator=generator),
        "action": torch.randint(ACTIONS, (ROLLOUTS,), generator=generator),
        "old_log_p": -torch.rand(ROLLOUTS, generator=generator) - 0.9,
        "advantage": trend + 0.5 * torch.randn(ROLLOUTS, generator=generator),
        "returns": torch.randn(ROLLOUTS, generator=generator),
    }


class Alone:
    def mean(self, values):
        return values.mean()


class OverWorkers(Alone):
    def mean(self, values):
        total = torch.stack([values.sum(), values.new_tensor(values.numel())])
        dist.all_reduce(total)
        return total[0] / total[1]


def normalised(advantage, statistics):
    mean = statistics.mean(advantage)
    variance = statistics.mean((advantage - mean).square())
    return (advantage - mean) / (variance.sqrt() + EPS)


def normalised_by_workers(advantage):
    statistics = OverWorkers()
    mean = statistics.mean(advantage)
    variance = statistics.mean(advantage.var(unbiased=False).expand_as(advantage))
    return (advantage - mean) / (variance.sqrt() + EPS)


def objective(model, batch, advantage):
    log_p, value = model(batch["observation"])
    ratio = (log_p.gather(1, batch["action"][:, None])[:, 0] - batch["old_log_p"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(log_p.exp() * log_p).sum(-1)
    error = (value - batch["returns"]).square()
    return (-gain + VALUE_WEIGHT * error - ENTROPY_WEIGHT * entropy).mean()


def loss(model, batch):
    return objective(model, batch, normalised(batch["advantage"], Alone()))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    objective(ddp, shard, normalised_by_workers(shard["advantage"])).backward()


case = Case(model=ActorCritic, batch=make_batch, loss=loss)
