"""One PPO update of a recurrent-free actor-critic from rollouts that were collected by several workers."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

CLIP, VALUE_COEF, ENTROPY_COEF = 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    def __init__(self, obs=6, actions=4, hidden=10):
        super().__init__()
        torch.manual_seed(17)
        self.trunk = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.policy(h), self.value(h).squeeze(-1)


def gae(rewards, values, gamma=0.97, lam=0.9):
    """Generalised advantage over dimension 1; `values` has one more entry than `rewards`."""
    out, running = [], torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        running = delta + gamma * lam * running
        out.append(running)
    return torch.stack(out[::-1], dim=1)


def ppo_loss(model, roll, advantages, returns):
    logits, values = model(roll["obs"])
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, roll["action"].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(chosen - roll["old_log_prob"])
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return -surrogate.mean() + VALUE_COEF * F.mse_loss(values, returns) - ENTROPY_COEF * entropy.mean()


def loss(model, batch):
    adv = gae(batch["reward"], batch["old_value"])
    returns = adv + batch["old_value"][:, :-1]
    adv = (adv - adv.mean()) / (adv.var(unbiased=False).sqrt() + 1e-8)
    return ppo_loss(model, batch, adv, returns)


def summed(*scalars):
    packed = torch.stack([torch.as_tensor(s, dtype=torch.float64) for s in scalars])
    dist.all_reduce(packed)
    return packed.unbind()


def moments(x):
    """Mean and variance of x over the workers, two passes for accuracy."""
    total, count = summed(x.sum(), x.numel())
    mean = total / count
    squares, = summed((x - x.mean()).square().sum())
    return mean.to(x.dtype), (squares / count).to(x.dtype)


def average(model):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for g in grads:
        g.copy_(flat[offset:offset + g.numel()].view_as(g))
        offset += g.numel()


def step(model, shard, rank):
    adv = gae(shard["reward"], shard["old_value"])
    returns = adv + shard["old_value"][:, :-1]
    mean, var = moments(adv)
    ppo_loss(model, shard, (adv - mean) / (var.sqrt() + 1e-8), returns).backward()
    average(model)
    return {name: p.grad for name, p in model.named_parameters()}


def rollouts(g):
    envs, horizon = 8, 5
    return {
        "obs": torch.randn(envs, horizon, 6, generator=g),
        "action": torch.randint(0, 4, (envs, horizon), generator=g),
        "old_log_prob": -1.4 + 0.1 * torch.randn(envs, horizon, generator=g),
        "reward": torch.randn(envs, horizon, generator=g) + torch.randn(envs, 1, generator=g),
        "old_value": torch.randn(envs, horizon + 1, generator=g),
    }


case = Case(model=ActorCritic, batch=rollouts, loss=loss, layout="2x1")
