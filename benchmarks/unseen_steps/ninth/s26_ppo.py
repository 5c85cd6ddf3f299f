"""PPO on stored rollouts: clipped surrogate, value loss and entropy; advantages are whitened."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

OBSERVATION, ACTIONS = 6, 4
CLIP, VALUE, ENTROPY = 0.2, 0.5, 0.01


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(OBSERVATION, 16), nn.Tanh())
        self.actor = nn.Linear(16, ACTIONS)
        self.critic = nn.Linear(16, 1)

    def act(self, observation):
        with torch.no_grad():
            return Categorical(logits=self.actor(self.shared(observation))).sample()

    def evaluate_actions(self, observation, action):
        hidden = self.shared(observation)
        policy = Categorical(logits=self.actor(hidden))
        return self.critic(hidden).squeeze(-1), policy.log_prob(action), policy.entropy()

    def forward(self, observation, action):
        return self.evaluate_actions(observation, action)


def rollouts(generator):
    shape = (16,)
    return {
        "observation": torch.randn(*shape, OBSERVATION, generator=generator),
        "action": torch.randint(0, ACTIONS, shape, generator=generator),
        "old_log_prob": -1.4 + 0.1 * torch.randn(*shape, generator=generator),
        "advantage": torch.randn(*shape, generator=generator) + torch.linspace(-1, 1, 16),
        "return": torch.randn(*shape, generator=generator),
    }


def whiten(advantage, total=lambda x: x):
    count = total(advantage.new_tensor(float(len(advantage))))
    mean = total(advantage.sum()) / count
    variance = total((advantage - mean).square().sum()) / count
    return (advantage - mean) / (variance.sqrt() + 1e-8)


def ppo(evaluated, batch, advantage):
    value, log_prob, entropy = evaluated
    ratio = (log_prob - batch["old_log_prob"]).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    of_value = F.mse_loss(value, batch["return"])
    return -surrogate.mean() + VALUE * of_value - ENTROPY * entropy.mean()


def loss(model, batch):
    evaluated = model(batch["observation"], batch["action"])
    return ppo(evaluated, batch, whiten(batch["advantage"]))


def over_ranks(number):
    dist.all_reduce(number)
    return number


class Learner:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)

    @property
    def policy(self):
        return self.ddp.module

    def learn(self, rollout):
        advantage = whiten(rollout["advantage"], total=over_ranks)
        evaluated = self.policy.evaluate_actions(rollout["observation"], rollout["action"])
        ppo(evaluated, rollout, advantage).backward()


def step(model, shard, rank):
    Learner(model).learn(shard)


case = Case(model=Policy, batch=rollouts, loss=loss)
