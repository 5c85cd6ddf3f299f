"""Masked prediction of acoustic units; the optimizer's state is sharded with ZeroRedundancyOptimizer."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

UNITS, FEATURES, FRAMES = 12, 5, 11


class ContextBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        h, _ = self.attention(h, h, h, need_weights=False)
        return x + self.out(torch.relu(h))


class UnitPredictor(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.project = nn.Linear(FEATURES, dim)
        self.mask_emb = nn.Parameter(torch.rand(dim))
        self.positions = nn.Parameter(0.1 * torch.randn(FRAMES, dim))
        self.context = nn.Sequential(ContextBlock(dim), ContextBlock(dim))
        self.norm = nn.LayerNorm(dim)
        self.units = nn.Linear(dim, UNITS)

    def forward(self, x, mask):
        x = torch.where(mask.unsqueeze(-1), self.mask_emb, self.project(x))
        return self.units(self.norm(self.context(x + self.positions)))


def features(generator):
    mask = torch.rand(8, FRAMES, generator=generator) < 0.4
    return {
        "x": torch.randn(8, FRAMES, FEATURES, generator=generator),
        "mask": mask,
        "unit": torch.randint(0, UNITS, (8, FRAMES), generator=generator),
    }


def loss(model, batch):
    """Masked frames count fully, the others by a tenth; per utterance, so that the batch may be cut anywhere."""
    logits = model(batch["x"], batch["mask"])
    nll = F.cross_entropy(logits.transpose(1, 2), batch["unit"], reduction="none")
    return (nll * torch.where(batch["mask"], 1.0, 0.1).to(nll)).sum(1).mean() / FRAMES


@dataclass
class OptimConfig:
    lr: float = 0.5
    weight_decay: float = 0.0  # swept from here up to 1e-2
    skip: tuple = ("bias", "norm")


def param_groups(model, config):
    """Matrices are decayed; biases and the parameters of norms are not."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decay = [p for n, p in named if p.ndim >= 2]
    no_decay = [p for n, p in named if p.ndim < 2 and any(part in n for part in config.skip)]
    return [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


class Pretrainer:
    def __init__(self, model, config):
        self.ddp = DDP(model)
        self.optimizer = ZeroRedundancyOptimizer(param_groups(model, config), torch.optim.SGD, lr=config.lr)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss(self.ddp, batch).backward()
        self.optimizer.step()


def step(model, shard, rank):
    config = OptimConfig()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    Pretrainer(model, config).step(shard)
    return {n: (before[n] - p.detach()) / config.lr for n, p in model.named_parameters()}


case = Case(model=UnitPredictor, batch=features, loss=loss, layout="1x2")
