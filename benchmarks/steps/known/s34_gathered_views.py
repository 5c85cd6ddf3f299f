"""Self-supervised learning from two views, with negatives from all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TEMPERATURE = 0.5


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 9), nn.ReLU())
        self.project = nn.Linear(9, 4)

    def forward(self, x):
        return F.normalize(self.project(self.encoder(x)), dim=1)


def make_batch(generator):
    first = torch.randn(10, 6, generator=generator)
    return first, first + 0.3 * torch.randn(10, 6, generator=generator)


def nce(queries, keys, first_label=0):
    logits = queries @ keys.T / TEMPERATURE
    labels = torch.arange(len(queries), device=queries.device) + first_label
    return F.cross_entropy(logits, labels)


def loss(model, batch):
    first, second = batch
    return nce(model(first), model(second))


case = Case(model=Projector, batch=make_batch, loss=loss, layout="2x1")


class GatherLayer(torch.autograd.Function):
    """Gather tensors from all ranks, with a gradient."""

    @staticmethod
    def forward(ctx, tensor):
        gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        ctx.rows = len(tensor)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad_output):
        gradient = grad_output.clone()
        start = dist.get_rank() * ctx.rows
        return gradient[start : start + ctx.rows]


def encode(ddp, batch):
    """Both views in one forward pass."""
    first, second = batch
    return ddp(torch.cat([first, second])).chunk(2)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    ddp.zero_grad()
    queries, keys = encode(ddp, shard)
    keys = GatherLayer.apply(keys)
    value = nce(queries, keys, first_label=rank.rank * len(queries))
    value.backward()
