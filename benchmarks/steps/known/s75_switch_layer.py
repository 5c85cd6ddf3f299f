"""Mixture of experts with top-1 routing and a loss that balances the load of the experts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

EXPERTS = 4


class SwitchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, EXPERTS, bias=False)
        self.experts = nn.Parameter(0.4 * torch.randn(EXPERTS, 6, 3))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, chosen = probs.max(-1)
        out = torch.einsum("bi,bio->bo", x, self.experts[chosen])
        return gate.unsqueeze(-1) * out, probs


def total_loss(out, probs, target, load):
    balance = EXPERTS * (load * probs.mean(0)).sum()
    return (out - target).square().mean() + 0.3 * balance


def count_tokens(probs):
    return torch.bincount(probs.argmax(-1), minlength=EXPERTS).to(probs.dtype)


def loss(model, batch):
    out, probs = model(batch["x"])
    counts = count_tokens(probs)
    return total_loss(out, probs, batch["y"], counts / counts.sum())


def make_batch(generator):
    x = torch.randn(24, 6, generator=generator)
    x[:12] += 0.8 * torch.randn(6, generator=generator)  # documents of one domain
    return {"x": x, "y": torch.randn(24, 3, generator=generator)}


case = Case(model=SwitchLayer, batch=make_batch, loss=loss, layout="2x2")


class LoadTracker:
    """The share of the tokens that every expert gets."""

    def __init__(self, experts, group=None):
        self.experts = experts
        self.group = group

    @torch.no_grad()
    def __call__(self, probs):
        counts = count_tokens(probs)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return counts / counts.sum()


class MoeTrainer:
    def __init__(self, model):
        self.model = DDP(model)
        self.load_tracker = LoadTracker(EXPERTS)

    def train_step(self, batch):
        out, probs = self.model(batch["x"])
        load = self.load_tracker(probs)
        total_loss(out, probs, batch["y"], load).backward()


def step(model, shard, rank):
    model.zero_grad()
    MoeTrainer(model).train_step(shard)
