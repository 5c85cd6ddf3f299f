"""Behaviour cloning of a continuous controller with masked action dimensions.
Plain replicas without DDP: gradients are summed by hand, the loss is divided by the global number of valid entries."""
import torch
import torch.distributed as dist
from torch import nn
from ddp_equivalence import Case

OBS, ACT = 9, 4
MICRO_BATCH = 3
MIN_LOG_STD, MAX_LOG_STD = -3.0, 1.0


class GaussianPolicy(nn.Module):
    def __init__(self, hidden=18):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(OBS, hidden), nn.LayerNorm(hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.mean = nn.Linear(hidden, ACT)
        self.log_std = nn.Linear(hidden, ACT)

    def forward(self, obs):
        h = self.trunk(obs)
        log_std = torch.tanh(self.log_std(h))
        log_std = MIN_LOG_STD + 0.5 * (MAX_LOG_STD - MIN_LOG_STD) * (log_std + 1)
        return self.mean(h), log_std


def build_model():
    return GaussianPolicy()


def masked_nll_sum(model, batch):
    mean, log_std = model(batch["obs"])
    z = (batch["action"] - mean) * torch.exp(-log_std)
    nll = 0.5 * z.square() + log_std
    return (nll * batch["valid"]).sum()


def loss(model, batch):
    return masked_nll_sum(model, batch) / batch["valid"].sum()


def make_batch(generator):
    rows = 18
    return {
        "obs": torch.randn(rows, OBS, generator=generator),
        "action": torch.randn(rows, ACT, generator=generator),
        "valid": (torch.rand(rows, ACT, generator=generator) < 0.7).double(),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def slices(shard, size):
    rows = shard["obs"].size(0)
    return [{k: v[i : i + size] for k, v in shard.items()} for i in range(0, rows, size)]


@torch.no_grad()
def sum_gradients(model):
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for p, chunk in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(chunk.view_as(p))


class CloningTrainer:
    def __init__(self, model):
        self.model = model

    def global_valid(self, shard):
        count = shard["valid"].sum()
        dist.all_reduce(count)
        return count

    def forward_backward(self, shard):
        denominator = self.global_valid(shard)
        total = 0.0
        for micro in slices(shard, MICRO_BATCH):
            micro_loss = masked_nll_sum(self.model, micro) / denominator
            micro_loss.backward()
            total = total + micro_loss.detach()
            sum_gradients(self.model)
        return total


def step(model, shard, rank):
    model.zero_grad(set_to_none=True)
    trainer = CloningTrainer(model)
    total = trainer.forward_backward(shard)
    dist.all_reduce(total)
    return
