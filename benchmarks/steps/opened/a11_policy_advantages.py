"""PPO's clipped objective; advantages are whitened over the valid steps of all actors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

EPISODES, HORIZON, OBS, ACTIONS = 12, 6, 5, 4
CLIP, ENTROPY = 0.2, 0.01


def policy():
    return nn.Sequential(nn.Linear(OBS, 20), nn.Tanh(), nn.Linear(20, ACTIONS))


def rollouts(g):
    lengths = torch.tensor([6, 2, 4, 5, 1, 3, 6, 6, 2, 4, 3, 5])
    spread = torch.linspace(0.3, 4.0, EPISODES)[:, None]
    return {
        "obs": torch.randn(EPISODES, HORIZON, OBS, generator=g),
        "action": torch.randint(0, ACTIONS, (EPISODES, HORIZON), generator=g),
        "old_logp": torch.full((EPISODES, HORIZON), 1 / ACTIONS).log(),
        "advantage": torch.randn(EPISODES, HORIZON, generator=g) * spread + 0.5,
        "valid": torch.arange(HORIZON) < lengths[:, None],
    }


def objective(logits, batch, whitened, steps):
    dist_ = torch.distributions.Categorical(logits=logits)
    ratio = (dist_.log_prob(batch["action"]) - batch["old_logp"]).exp()
    gain = torch.minimum(ratio * whitened, ratio.clamp(1 - CLIP, 1 + CLIP) * whitened)
    per_step = -gain - ENTROPY * dist_.entropy()
    return (per_step * batch["valid"]).sum() / steps


def whiten(values, mean, variance):
    return (values - mean) / (variance + 1e-8).sqrt()


def loss(model, batch):
    valid = batch["advantage"][batch["valid"]]
    whitened = whiten(batch["advantage"], valid.mean(), valid.var(unbiased=False))
    return objective(model(batch["obs"]), batch, whitened, batch["valid"].sum())


class Moments:
    """Moments over ranks with different numbers of valid steps."""

    def __init__(self, values):
        self.values = values
        self.count = self.everywhere(values.new_tensor(float(values.numel())))

    @staticmethod
    def everywhere(x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    def mean(self):
        return self.everywhere(self.values.sum()) / self.count

    def variance(self):
        centred = self.values - self.values.mean()
        return self.everywhere(centred.square().sum()) / self.count


def step(model, shard, rank):
    moments = Moments(shard["advantage"][shard["valid"]])
    whitened = whiten(shard["advantage"], moments.mean(), moments.variance())
    ddp = DDP(model)
    steps = moments.count / dist.get_world_size()
    objective(ddp(shard["obs"]), shard, whitened, steps).backward()


case = Case(model=policy, batch=rollouts, loss=loss, layout="2x2")
