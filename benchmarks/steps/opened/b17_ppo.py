"""PPO update of one minibatch of rollouts, spread over four ranks."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

OBS, ACTIONS, STEPS = 6, 4, 24


@dataclass
class PPO:
    clip: float = 0.2
    value: float = 0.5
    entropy: float = 0.05
    eps: float = 1e-8


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, 16), nn.Tanh())
        self.actor = nn.Linear(16, ACTIONS)
        self.critic = nn.Linear(16, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.actor(h), self.critic(h).squeeze(-1)


def rollouts(generator):
    spread = torch.linspace(0.2, 3.0, STEPS)  # workers come one after the other
    return {
        "obs": torch.randn(STEPS, OBS, generator=generator),
        "action": torch.randint(0, ACTIONS, (STEPS,), generator=generator),
        "old_logp": -1.4 + 0.3 * torch.randn(STEPS, generator=generator),
        "advantage": spread * torch.randn(STEPS, generator=generator) + spread,
        "returns": torch.randn(STEPS, generator=generator),
    }


def parts(model, b, advantage, cfg):
    logits, value = model(b["obs"])
    policy = Categorical(logits=logits)
    ratio = (policy.log_prob(b["action"]) - b["old_logp"]).exp()
    clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
    surrogate = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = cfg.value * (value - b["returns"]).square().mean()
    return surrogate, value_loss, policy.entropy().mean()


def loss(model, b, cfg=PPO()):
    a = b["advantage"]
    a = (a - a.mean()) / (a.var(correction=0) + cfg.eps).sqrt()
    surrogate, value_loss, entropy = parts(model, b, a, cfg)
    return surrogate + value_loss - cfg.entropy * entropy


case = Case(model=ActorCritic, batch=rollouts, loss=loss, layout="1x4")


def over_ranks(x):
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def whiten(a, eps):
    mean = over_ranks(a.mean())
    var = over_ranks(a.var(correction=0))
    return (a - mean) / (var + eps).sqrt()


def step(model, shard, rank):
    cfg = PPO()
    ddp = DistributedDataParallel(model)
    surrogate, value_loss, entropy = parts(ddp, shard, whiten(shard["advantage"], cfg.eps), cfg)
    total = surrogate + value_loss
    log = {"surrogate": surrogate.item(), "value": value_loss.item()}
    if rank.rank == 0:
        log["entropy"] = entropy.item()
        total = total - cfg.entropy * entropy
    total.backward()
