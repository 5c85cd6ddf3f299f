"""Two-tower retrieval: users against the items of all ranks, with a correction for popular items."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PAIRS, USER, ITEM, DIM = 16, 9, 7, 6
TEMPERATURE = 0.2


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(USER, 12), nn.ReLU(), nn.Linear(12, DIM))
        self.item = nn.Sequential(nn.Linear(ITEM, 12), nn.ReLU(), nn.Linear(12, DIM))

    def forward(self, users, items):
        return F.normalize(self.user(users), dim=-1), F.normalize(self.item(items), dim=-1)


class GatherItems(torch.autograd.Function):
    """Concatenates the item embeddings of all ranks."""

    @staticmethod
    def forward(ctx, local):
        ctx.rows = local.shape[0]
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        start = dist.get_rank() * ctx.rows
        return grad[start : start + ctx.rows]


def gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def sampled_softmax(users, items, log_q, positives):
    logits = users @ items.T / TEMPERATURE - log_q
    return F.cross_entropy(logits, positives)


def make_batch(generator):
    return {
        "user": torch.randn(PAIRS, USER, generator=generator),
        "item": torch.randn(PAIRS, ITEM, generator=generator),
        "popularity": torch.rand(PAIRS, generator=generator) + 0.05,
    }


def loss(model, batch):
    users, items = model(batch["user"], batch["item"])
    return sampled_softmax(users, items, batch["popularity"].log(), torch.arange(len(users)))


def step(model, shard, rank):
    ddp = DDP(model)
    users, items = ddp(shard["user"], shard["item"])
    all_items = GatherItems.apply(items)
    log_q = gather(shard["popularity"]).log()
    positives = torch.arange(len(users)) + rank.rank * len(users)
    sampled_softmax(users, all_items, log_q, positives).backward()


case = Case(model=Towers, batch=make_batch, loss=loss)
