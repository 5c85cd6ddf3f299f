"""Matrix factorisation with a small tower, trained with BPR on (user, liked, other) triples."""
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class Config:
    users: int = 9
    items: int = 14
    dim: int = 5
    no_decay: tuple = ("bias", "norm")
    l2: float = 1e-2
    groups: dict = field(default_factory=dict)


CFG = Config()


class Tower(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.dim)
        self.item = nn.Embedding(cfg.items, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim)
        self.mix = nn.Linear(cfg.dim, cfg.dim)

    def score(self, users, items):
        u = self.mix(self.norm(self.user(users)))
        return (u * self.item(items)).sum(-1)

    def forward(self, users, liked, other):
        return self.score(users, liked) - self.score(users, other)


def make_batch(generator):
    n = 24
    return {
        "users": torch.randint(0, CFG.users, (n,), generator=generator),
        "liked": torch.randint(0, CFG.items, (n,), generator=generator),
        "other": torch.randint(0, CFG.items, (n,), generator=generator),
    }


def bpr(model, batch):
    return F.softplus(-model(batch["users"], batch["liked"], batch["other"])).mean()


def decayed(model, cfg=CFG):
    return [p for n, p in model.named_parameters() if not any(key in n for key in cfg.no_decay)]


def loss(model, batch):
    penalty = sum(p.square().sum() for p in decayed(model))
    return bpr(model, batch) + CFG.l2 * penalty


class ParamGroups:
    """The two groups that the optimizer and the reducer share."""

    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        chosen = {id(p) for p in decayed(model, cfg)}
        self.decay = [p for p in model.parameters() if id(p) in chosen]
        self.plain = [p for p in model.parameters() if id(p) not in chosen]

    def __iter__(self):
        yield {"params": self.decay, "weight_decay": self.cfg.l2}
        yield {"params": self.plain, "weight_decay": 0.0}


def reduce_groups(groups, world_size):
    for group in groups:
        if not group["weight_decay"]:
            continue
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad.div_(world_size)


def step(model, shard, rank):
    groups = ParamGroups(model, CFG)
    loss(model, shard).backward()
    reduce_groups(groups, rank.world_size)


case = Case(model=Tower, batch=make_batch, loss=loss, layout="1x2")
