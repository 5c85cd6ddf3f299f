"""Two-tower retrieval: every user is scored against the items of all ranks (sampled softmax)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

USERS, ITEMS, DIM = 30, 60, 8
TEMPERATURE = 0.5


class GatherRows(Function):
    """Rows of all ranks, in the order of the ranks, with a gradient."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rank = dist.get_rank()
        ctx.world = dist.get_world_size()
        parts = [torch.zeros_like(rows) for _ in range(ctx.world)]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        chunks = grad.contiguous().chunk(ctx.world)
        return chunks[ctx.rank].clone()


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM)
        self.user_mlp = nn.Sequential(nn.Linear(DIM + 3, 12), nn.ReLU(), nn.Linear(12, DIM))
        self.item_mlp = nn.Linear(DIM, DIM)

    def forward(self, batch):
        user = self.user_mlp(torch.cat([self.users(batch["user"]), batch["context"]], dim=1))
        item = self.item_mlp(self.items(batch["item"]))
        return F.normalize(user, dim=1), F.normalize(item, dim=1)


def make_batch(generator):
    n = 16
    popularity = torch.rand(ITEMS, generator=generator) ** 3 + 0.01
    item = torch.multinomial(popularity, n, replacement=True, generator=generator)
    return {
        "user": torch.randint(0, USERS, (n,), generator=generator),
        "item": item,
        "context": torch.randn(n, 3, generator=generator),
        "log_q": (popularity[item] / popularity.sum()).log(),
    }


def scores(user, item, log_q):
    # logQ correction: popular items appear as negatives too often
    return user @ item.T / TEMPERATURE - log_q


def loss(model, batch):
    user, item = model(batch)
    logits = scores(user, item, batch["log_q"])
    return F.cross_entropy(logits, torch.arange(len(user)))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    user, item = ddp(shard)
    items = GatherRows.apply(item)
    log_q = GatherRows.apply(shard["log_q"])
    first = rank.rank * len(user)
    labels = torch.arange(first, first + len(user))
    F.cross_entropy(scores(user, items, log_q), labels).backward()


case = Case(model=Retrieval, batch=make_batch, loss=loss, layout="2x2")
