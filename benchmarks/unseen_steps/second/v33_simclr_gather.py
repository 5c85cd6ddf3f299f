"""SimCLR: two views of every image, negatives from all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXAMPLES, FEATURES, WIDTH, TEMPERATURE = 16, 8, 5, 0.2


class GatherLayer(torch.autograd.Function):
    """Embeddings of all ranks, in the order of the ranks, with gradients."""

    @staticmethod
    def forward(ctx, embeddings):
        gathered = [torch.empty_like(embeddings) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, embeddings.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU())
        self.projection = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, WIDTH))

    def forward(self, x):
        return F.normalize(self.projection(self.backbone(x)), dim=-1)


def half_of_nt_xent(query, same_view, other_view, first):
    """Every row's positive is the same image in the other view."""
    rows = torch.arange(len(query))
    to_same = query @ same_view.T / TEMPERATURE
    itself = torch.zeros_like(to_same, dtype=torch.bool)
    itself[rows, rows + first] = True
    to_same = to_same.masked_fill(itself, -torch.inf)
    to_other = query @ other_view.T / TEMPERATURE
    return F.cross_entropy(torch.cat([to_other, to_same], dim=1), rows + first)


def nt_xent(z1, z2, all1, all2, first):
    return (half_of_nt_xent(z1, all1, all2, first) + half_of_nt_xent(z2, all2, all1, first)) / 2


def embed(model, batch):
    both = model(torch.cat([batch["view1"], batch["view2"]]))
    return both.chunk(2)


def loss(model, batch):
    z1, z2 = embed(model, batch)
    return nt_xent(z1, z2, z1, z2, first=0)


def make_batch(generator):
    images = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return {
        "view1": images + 0.3 * torch.randn(EXAMPLES, FEATURES, generator=generator),
        "view2": images + 0.3 * torch.randn(EXAMPLES, FEATURES, generator=generator),
    }


case = Case(model=Projector, batch=make_batch, loss=loss, layout="1x2")


class SimCLR:
    def __init__(self, model, rank):
        self.model = DistributedDataParallel(model)
        self.rank = rank

    def training_step(self, batch):
        z1, z2 = embed(self.model, batch)
        all1, all2 = GatherLayer.apply(z1), GatherLayer.apply(z2)
        return nt_xent(z1, z2, all1, all2, first=self.rank * len(z1))


def step(model, shard, rank):
    trainer = SimCLR(model, rank.rank)
    trainer.training_step(shard).backward()
