"""Pockets of proteins and the ligands that bind them: a contrastive loss over the pairs of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PAIRS, POCKET, LIGAND, SPACE = 16, 9, 7, 6


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.pocket = nn.Sequential(nn.Linear(POCKET, 12), nn.ReLU(), nn.Linear(12, SPACE))
        self.ligand = nn.Linear(LIGAND, SPACE)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pocket, ligand):
        a = F.normalize(self.pocket(pocket), dim=-1)
        b = F.normalize(self.ligand(ligand), dim=-1)
        return a, b, self.log_scale.exp()


def complexes(generator):
    return {
        "pocket": torch.randn(PAIRS, POCKET, generator=generator),
        "ligand": torch.randn(PAIRS, LIGAND, generator=generator),
    }


class AllPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        ctx.rows = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, slope):
        slope = slope.clone()
        dist.all_reduce(slope)  # other ranks used our rows as negatives
        return slope.split(ctx.rows)[dist.get_rank()]


def matches(queries, keys, scale, first):
    """Row i of the queries belongs to row first + i of the keys."""
    answers = torch.arange(len(queries)) + first
    return F.cross_entropy(scale * queries @ keys.T, answers)


def loss(model, batch):
    a, b, scale = model(batch["pocket"], batch["ligand"])
    return (matches(a, b, scale, 0) + matches(b, a, scale, 0)) / 2


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    a, b, scale = ddp(shard["pocket"], shard["ligand"])
    first = rank.rank * len(a)
    to_ligands = matches(a, AllPairs.apply(b), scale, first)
    to_pockets = matches(b, AllPairs.apply(a), scale, rank.rank)
    ((to_ligands + to_pockets) / 2).backward()


case = Case(model=TwoTowers, batch=complexes, loss=loss, layout="1x2")
