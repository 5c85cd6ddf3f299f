"""Double DQN on a prioritised replay buffer, with importance weights of at most one."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

STATE, ACTIONS = 5, 3
GAMMA, BETA, CAPACITY = 0.97, 0.6, 1000


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 16), nn.ReLU())
        self.value = nn.Linear(16, 1)
        self.advantage = nn.Linear(16, ACTIONS)

    def forward(self, state):
        hidden = self.body(state)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(-1, keepdim=True)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = Dueling()
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def transitions(generator):
    count = 16
    # Rank 0 is dealt the oldest ones, whose priority has decayed.
    probability = torch.linspace(0.2, 3.0, count) * (
        0.5 + torch.rand(count, generator=generator)
    )
    return {
        "state": torch.randn(count, STATE, generator=generator),
        "action": torch.randint(0, ACTIONS, (count, 1), generator=generator),
        "reward": torch.randn(count, generator=generator) * 2,
        "next": torch.randn(count, STATE, generator=generator),
        "done": (torch.rand(count, generator=generator) < 0.2).float(),
        "probability": probability / CAPACITY,
    }


def temporal_difference(agent, batch):
    chosen = agent.online(batch["state"]).gather(1, batch["action"]).squeeze(1)
    with torch.no_grad():
        best = agent.online(batch["next"]).argmax(1, keepdim=True)
        future = agent.target(batch["next"]).gather(1, best).squeeze(1)
        wanted = batch["reward"] + GAMMA * (1 - batch["done"]) * future
    return F.smooth_l1_loss(chosen, wanted, reduction="none")


def importance(probability):
    weights = (CAPACITY * probability) ** -BETA
    return weights / weights.max()


def loss(model, batch):
    return (importance(batch["probability"]) * temporal_difference(model, batch)).mean()


class Replica:
    """Keeps the online networks of all ranks together; the target copies are never exchanged."""

    def __init__(self, agent, rank):
        self.agent, self.rank = agent, rank
        self.priorities = None

    def synchronise(self):
        parameters = list(self.agent.online.parameters())
        vector = nn.utils.parameters_to_vector([p.grad for p in parameters])
        dist.all_reduce(vector)
        vector /= self.rank.world_size
        nn.utils.vector_to_parameters(vector, [p.grad for p in parameters])

    def learn(self, batch):
        errors = temporal_difference(self.agent, batch)
        weights = importance(batch["probability"])
        (weights * errors).mean().backward()
        self.synchronise()
        self.priorities = errors.detach() + 1e-3


def step(model, shard, rank):
    Replica(model, rank).learn(shard)


case = Case(model=Agent, batch=transitions, loss=loss, layout="1x2")
