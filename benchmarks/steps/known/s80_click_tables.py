"""Click prediction: only the rows of the embedding tables that were looked up are exchanged."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

USERS, ITEMS, DIM = 30, 20, 4


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_table = nn.Embedding(USERS, DIM)
        self.item_table = nn.Embedding(ITEMS, DIM)
        self.over = nn.Sequential(nn.Linear(2 * DIM, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, user, item):
        pair = torch.cat([self.user_table(user), self.item_table(item)], dim=-1)
        return self.over(pair).squeeze(-1)


def loss(model, batch):
    logits = model(batch["user"], batch["item"])
    return F.binary_cross_entropy_with_logits(logits, batch["click"])


def make_batch(generator):
    user = torch.randint(0, USERS, (16,), generator=generator)
    user[:8] = user[:1]  # one long session, then a mix of short ones
    return {
        "user": user,
        "item": torch.randint(0, ITEMS, (16,), generator=generator),
        "click": torch.randint(0, 2, (16,), generator=generator).double(),
    }


case = Case(model=ClickModel, batch=make_batch, loss=loss, layout="1x2")


class TableExchange:
    def __init__(self, world_size):
        self.world_size = world_size

    def gather(self, tensor):
        everyone = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(everyone, tensor)
        return everyone

    def __call__(self, table, ids):
        rows = ids.unique()
        count = len(rows)
        counts = [int(n) for n in self.gather(torch.tensor([count], device=ids.device))]
        # collectives want equal shapes
        padding = max(counts) - count
        all_rows = self.gather(F.pad(rows, (0, padding)))
        all_values = self.gather(F.pad(table.grad[rows], (0, 0, 0, padding)))
        table.grad.zero_()
        for other, _ in enumerate(counts):
            theirs = all_rows[other][:count], all_values[other][:count]
            table.grad.index_add_(0, *theirs)
        table.grad.div_(self.world_size)


def step(model, shard, rank):
    model.zero_grad()
    loss(model, shard).backward()
    exchange = TableExchange(rank.world_size)
    exchange(model.user_table.weight, shard["user"])
    exchange(model.item_table.weight, shard["item"])
    for p in model.over.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(rank.world_size)
