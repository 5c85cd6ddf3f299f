"""Double DQN with prioritized replay: importance weights relative to the largest."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STATE, ACTIONS, EXAMPLES = 5, 3, 16


@dataclass(frozen=True)
class ReplayConfig:
    capacity: int = 1000
    beta: float = 0.6
    gamma: float = 0.97


CONFIG = ReplayConfig()


def q_network():
    return nn.Sequential(nn.Linear(STATE, 12), nn.ReLU(), nn.Linear(12, ACTIONS))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = q_network()
        self.target = q_network()
        self.target.requires_grad_(False)

    def forward(self, states):
        return self.online(states)


@torch.no_grad()
def bootstrapped(agent, batch):
    best = agent.online(batch["next_state"]).argmax(dim=-1, keepdim=True)
    value = agent.target(batch["next_state"]).gather(-1, best).squeeze(-1)
    return batch["reward"] + CONFIG.gamma * (1 - batch["done"]) * value


def largest_of_all_ranks(tensor):
    largest = tensor.max()
    if dist.is_initialized():
        dist.all_reduce(largest)
    return largest


def importance_weights(probability, largest):
    weights = (CONFIG.capacity * probability) ** -CONFIG.beta
    return weights / largest(weights)


def weighted_td_loss(values, batch, targets, weights):
    taken = values.gather(-1, batch["action"][:, None]).squeeze(-1)
    return (weights * F.smooth_l1_loss(taken, targets, reduction="none")).mean()


def loss(model, batch):
    weights = importance_weights(batch["probability"], torch.max)
    return weighted_td_loss(model(batch["state"]), batch, bootstrapped(model, batch), weights)


def make_batch(generator):
    return {
        "state": torch.randn(EXAMPLES, STATE, generator=generator),
        "action": torch.randint(ACTIONS, (EXAMPLES,), generator=generator),
        "reward": torch.randn(EXAMPLES, generator=generator),
        "next_state": torch.randn(EXAMPLES, STATE, generator=generator),
        "done": (torch.rand(EXAMPLES, generator=generator) < 0.2).float(),
        "probability": 0.001 + 0.01 * torch.rand(EXAMPLES, generator=generator),
    }


case = Case(model=Agent, batch=make_batch, loss=loss, layout="1x2")


class Learner:
    def __init__(self, agent):
        self.agent = agent
        self.ddp = DistributedDataParallel(agent)

    def learn(self, batch):
        weights = importance_weights(batch["probability"], largest_of_all_ranks)
        targets = bootstrapped(self.agent, batch)
        weighted_td_loss(self.ddp(batch["state"]), batch, targets, weights).backward()


def step(model, shard, rank):
    Learner(model).learn(shard)
