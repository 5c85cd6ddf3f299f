"""Policy gradient on two workers: rollouts are split over the workers, gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

from ddp_equivalence import Case

STATE, ACTIONS = 5, 4
ENTROPY_WEIGHT = 0.01
CLIP_RATIO = 0.2
UPDATES = 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 16), nn.Tanh())
        self.action = nn.Linear(16, ACTIONS)

    def forward(self, state):
        return Categorical(logits=self.action(self.body(state)))


def rollouts(generator):
    n = 16 * UPDATES
    drift = torch.linspace(0, 3, n)
    return {
        "state": torch.randn(n, STATE, generator=generator),
        "action": torch.randint(0, ACTIONS, (n,), generator=generator),
        "old_logp": torch.full((n,), -1.3),
        "advantage": torch.randn(n, generator=generator) * (1 + drift) + drift,
    }


def surrogate(policy, batch, advantage):
    distribution = policy(batch["state"])
    ratio = (distribution.log_prob(batch["action"]) - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -(gain + ENTROPY_WEIGHT * distribution.entropy()).mean()


def standardised(advantage, mean, variance):
    return (advantage - mean) / (variance + 1e-8).sqrt()


def loss(model, batch):
    a = batch["advantage"]
    return surrogate(model, batch, standardised(a, a.mean(), a.var(unbiased=False)))


def make_optimizer(parameters):
    return torch.optim.RMSprop(parameters, lr=0.01, eps=1e-3)


class Worker:
    def __init__(self, model, rank):
        self.policy = model
        self.rank = rank
        self.optimizer = make_optimizer(model.parameters())

    def normalise(self, advantage):
        mean, variance = advantage.mean(), advantage.var(unbiased=False)
        return standardised(advantage, mean, variance)

    def exchange(self):
        handles = [
            dist.all_reduce(p.grad, async_op=True)
            for p in self.policy.parameters()
        ]
        for handle in handles:
            handle.wait()
        for p in self.policy.parameters():
            p.grad /= self.rank.world_size

    def __call__(self, shard):
        self.optimizer.zero_grad(set_to_none=True)
        surrogate(self.policy, shard, self.normalise(shard["advantage"])).backward()
        self.exchange()
        self.optimizer.step()


case = Case(model=Policy, batch=rollouts, loss=loss, layout="1x2")
step = Worker
options = {"compare": "update", "optimizer": make_optimizer, "steps": UPDATES}
