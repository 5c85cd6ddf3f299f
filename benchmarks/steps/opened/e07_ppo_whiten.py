"""PPO with the clipped objective, a clipped value loss and an entropy bonus. Three workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

OBS, ACTIONS, SAMPLES = 6, 4, 24
CLIP, VF_CLIP, VF_COEF, ENT_COEF = 0.2, 0.3, 0.5, 0.01


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(OBS, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, ACTIONS), nn.Linear(32, 1)

    def forward(self, obs):
        h = self.torso(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def rollouts(g):
    # later samples come from harder levels: larger and noisier advantages
    hardness = torch.linspace(0.2, 3.0, SAMPLES)
    return {
        "obs": torch.randn(SAMPLES, OBS, generator=g),
        "actions": torch.randint(ACTIONS, (SAMPLES,), generator=g),
        "logp": -torch.rand(SAMPLES, generator=g) - 1.0,
        "adv": hardness * torch.randn(SAMPLES, generator=g) + hardness,
        "returns": torch.randn(SAMPLES, generator=g),
        "values": 0.3 * torch.randn(SAMPLES, generator=g),
    }


def moments(x):
    return x.mean(), x.std()


def make_objective(moments_of):
    def objective(model, batch):
        logits, value = model(batch["obs"])
        pi = Categorical(logits=logits)
        mean, std = moments_of(batch["adv"])
        adv = (batch["adv"] - mean) / (std + 1e-8)
        ratio = (pi.log_prob(batch["actions"]) - batch["logp"]).exp()
        surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
        near = batch["values"] + (value - batch["values"]).clamp(-VF_CLIP, VF_CLIP)
        errors = torch.maximum((value - batch["returns"]) ** 2, (near - batch["returns"]) ** 2)
        return -surrogate.mean() + VF_COEF * errors.mean() - ENT_COEF * pi.entropy().mean()

    return objective


loss = make_objective(moments)
case = Case(model=ActorCritic, batch=rollouts, loss=loss, layout="1x3")


def mpi_avg(x):
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def mpi_moments(x):
    """Mean and (unbiased) standard deviation of the samples of all workers."""
    n = x.numel() * dist.get_world_size()
    mean = mpi_avg(x.mean())
    var = mpi_avg((x - x.mean()).square().mean())
    return mean, (var * n / (n - 1)).sqrt()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    objective = make_objective(mpi_moments)
    objective(ddp, shard).backward()
