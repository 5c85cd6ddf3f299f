"""PPO update of an actor-critic; every rank has the rollouts of its own environments.
Advantages are whitened over the rollouts of all ranks, DDP averages the gradients."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

OBS, ACTIONS = 7, 4
CLIP, VF_COEF, ENT_COEF = 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, ACTIONS)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.policy(h).log_softmax(dim=-1), self.value(h).squeeze(-1)


def build_model():
    return ActorCritic()


def ppo_objective(model, batch, advantages):
    log_probs, values = model(batch["obs"])
    new_logp = log_probs.gather(1, batch["action"][:, None]).squeeze(1)
    ratio = (new_logp - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    value_loss = F.mse_loss(values, batch["returns"])
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
    return policy_loss + VF_COEF * value_loss - ENT_COEF * entropy


def loss(model, batch):
    adv = batch["advantage"]
    adv = (adv - adv.mean()) / (adv.var(unbiased=False) + 1e-8).sqrt()
    return ppo_objective(model, batch, adv)


def make_batch(generator):
    rows = 20
    difficulty = torch.linspace(-2.0, 2.0, rows)
    return {
        "obs": torch.randn(rows, OBS, generator=generator),
        "action": torch.randint(0, ACTIONS, (rows,), generator=generator),
        "old_logp": -1.386 + 0.05 * torch.randn(rows, generator=generator),
        "advantage": difficulty + 0.7 * torch.randn(rows, generator=generator),
        "returns": torch.randn(rows, generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def mean_over_ranks(x, world_size):
    out = x.detach().clone()
    dist.all_reduce(out, op=dist.ReduceOp.SUM)
    return out / world_size


def whiten(advantages, world_size, eps=1e-8):
    """Zero mean and unit variance over the global batch."""
    mean = mean_over_ranks(advantages.mean(), world_size)
    local_var = advantages.var(unbiased=False)
    var = mean_over_ranks(local_var, world_size)
    return (advantages - mean) * torch.rsqrt(var + eps)


class PPOLearner:
    def __init__(self, model, rank):
        self.model = DDP(model)
        self.world_size = rank.world_size

    def update(self, rollouts):
        advantages = whiten(rollouts["advantage"], self.world_size)
        objective = ppo_objective(self.model, rollouts, advantages)
        objective.backward()
        return mean_over_ranks(objective, self.world_size)


def step(model, shard, rank):
    learner = PPOLearner(model, rank)
    learner.update(shard)
