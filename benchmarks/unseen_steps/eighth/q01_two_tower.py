"""Two-tower recommender: users and items are embedded, and the dot product predicts a rating.

The rows of a step do not fit into memory at once, so that a rank goes through them in small pieces.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

USERS, ITEMS, DIM = 30, 50, 8
ROWS_AT_ONCE = 4
STEPS = 2
LR = 0.05


class Tower(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.table = nn.Embedding(count, DIM)
        self.mix = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))

    def forward(self, ids):
        return self.mix(self.table(ids))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower(USERS)
        self.item = Tower(ITEMS)
        self.bias = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias


def ratings(generator):
    n = 20 * STEPS
    return {
        "user": torch.randint(0, USERS, (n,), generator=generator),
        "item": torch.randint(0, ITEMS, (n,), generator=generator),
        "stars": torch.rand(n, generator=generator) * 4 + 1,
    }


def loss(model, batch):
    return F.mse_loss(model(batch["user"], batch["item"]), batch["stars"])


def pieces_of(shard):
    n = len(shard["stars"])
    for start in range(0, n, ROWS_AT_ONCE):
        yield {key: value[start : start + ROWS_AT_ONCE] for key, value in shard.items()}


class Fit:
    def __init__(self, model, rank):
        self.ddp = DDP(model)
        self.optimizer = make_optimizer(model.parameters())

    def __call__(self, shard):
        self.optimizer.zero_grad()
        pieces = list(pieces_of(shard))
        for piece in pieces[:-1]:
            with self.ddp.no_sync():
                self.backward(piece, pieces)
        self.backward(pieces[-1], pieces)
        self.optimizer.step()

    def backward(self, piece, pieces):
        value = loss(self.ddp, piece)
        (value / len(pieces)).backward()


def make_optimizer(parameters):
    return torch.optim.Adagrad(parameters, lr=LR)


case = Case(model=TwoTower, batch=ratings, loss=loss, layout="1x2")
step = Fit
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
