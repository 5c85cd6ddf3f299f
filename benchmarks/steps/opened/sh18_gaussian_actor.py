"""Continuous control, advantage actor-critic: trunk and heads are sharded, the vector of log standard deviations is
too small to cut and stays whole on each rank."""
import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case


class Trunk(nn.Module):
    def __init__(self, obs, hidden):
        super().__init__()
        self.lift = nn.Linear(obs, hidden)
        self.gate = nn.Linear(obs, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x):
        return self.norm(torch.tanh(self.lift(x)) * torch.sigmoid(self.gate(x)))


class GaussianActor(nn.Module):
    def __init__(self, obs=7, actions=3, hidden=10):
        super().__init__()
        torch.manual_seed(57)
        self.trunk = Trunk(obs, hidden)
        self.mean = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, obs):
        h = self.trunk(obs)
        return self.mean(h), self.log_std.expand(obs.shape[0], -1), self.critic(h).squeeze(-1)


def log_density(action, mean, log_std):
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def a2c(model, batch, entropy_coef=0.02):
    mean, log_std, value = model(batch["obs"])
    advantage = (batch["return"] - value).detach()
    actor = -(log_density(batch["action"], mean, log_std) * advantage).mean()
    critic = 0.5 * (batch["return"] - value).square().mean()
    return actor + critic - entropy_coef * log_std.sum(-1).mean()


loss = a2c


class Learner:
    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh
        self.whole = {model.log_std}
        fully_shard(model.trunk, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=self.whole)

    def accumulate(self, batch, pieces):
        size = len(batch["obs"]) // pieces
        for i in range(pieces):
            last = i == pieces - 1
            self.model.set_requires_gradient_sync(last)
            part = {k: v[i * size:(i + 1) * size] for k, v in batch.items()}
            (a2c(self.model, part) / pieces).backward()

    def gradients(self):
        grads = {}
        for name, p in self.model.named_parameters():
            grads[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        return grads


def step(model, shard, rank):
    learner = Learner(model, init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp",)))
    learner.accumulate(shard, pieces=2)
    return learner.gradients()


def transitions(g):
    return {
        "obs": torch.randn(8, 7, generator=g),
        "action": torch.randn(8, 3, generator=g),
        "return": torch.randn(8, generator=g),
    }


case = Case(model=GaussianActor, batch=transitions, loss=loss, layout="1x2")
