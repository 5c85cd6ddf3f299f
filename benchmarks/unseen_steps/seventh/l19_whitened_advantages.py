"""Policy gradients; advantages are whitened over the episodes of all workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

from ddp_equivalence import Case


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 12), nn.Tanh())
        self.actor = nn.Linear(12, 3)

    def forward(self, states):
        return Categorical(logits=self.actor(self.trunk(states)))


def rollouts(generator):
    level = torch.arange(12.0) // 6 * 3  # the second worker plays an easier level
    return {
        "states": torch.randn(12, 4, generator=generator),
        "actions": torch.randint(0, 3, (12,), generator=generator),
        "returns": torch.randn(12, generator=generator) + level,
    }


def local_mean(values):
    return values.mean()


def global_mean(values):
    total = torch.stack([values.sum(), values.new_tensor(float(values.numel()))])
    dist.all_reduce(total)
    return total[0] / total[1]


def whiten(returns, mean):
    centre = mean(returns)
    variance = mean((returns - centre) ** 2)
    return (returns - centre) / (variance + 1e-6).sqrt()


def whiten_over_workers(returns):
    centre = global_mean(returns)
    variance = global_mean((returns - returns.mean()) ** 2)
    return (returns - centre) / (variance + 1e-6).sqrt()


def surrogate(model, batch, advantages):
    policy = model(batch["states"])
    return -(policy.log_prob(batch["actions"]) * advantages).mean() - 0.01 * policy.entropy().mean()


def loss(model, batch):
    return surrogate(model, batch, whiten(batch["returns"], local_mean))


class Worker:
    def __init__(self, model, rank):
        self.model, self.peers = model, rank.world_size

    def learn(self, episodes):
        advantages = whiten_over_workers(episodes["returns"])
        surrogate(self.model, episodes, advantages).backward()
        gradients = [p.grad for p in self.model.parameters()]
        dist.all_reduce_coalesced(gradients)
        torch._foreach_div_(gradients, self.peers)


def step(model, shard, rank):
    Worker(model, rank).learn(shard)


case = Case(model=Agent, batch=rollouts, loss=loss, layout="1x2")
