"""Tabular credit scoring with an optimizer whose state is spread over the ranks.

Each rank keeps Adam's moments for its share of the parameters, updates these, and hands the new
weights to everybody.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

COLUMNS, BINS = 6, 8
LR = 0.02
STEPS = 3


class Scorer(nn.Module):
    """Piecewise-linear encoding with fixed knots, then an MLP."""

    def __init__(self):
        super().__init__()
        self.shrink = nn.Linear(COLUMNS, COLUMNS)
        self.knots = nn.Parameter(torch.linspace(-2, 2, BINS), requires_grad=False)
        self.hidden = nn.Linear(COLUMNS * BINS, 12)
        self.out = nn.Linear(12, 1)

    def forward(self, columns):
        columns = torch.tanh(self.shrink(columns)) * 2
        encoded = (columns[..., None] - self.knots).relu().flatten(1)
        return self.out(torch.relu(self.hidden(encoded))).squeeze(-1)


def applicants(generator):
    n = 12 * STEPS
    columns = torch.randn(n, COLUMNS, generator=generator)
    return {"columns": columns, "default": (columns.sum(1) > 0).float()}


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["columns"]), batch["default"])


def make_optimizer(parameters):
    return torch.optim.Adam([p for p in parameters if p.requires_grad], lr=LR, eps=1e-4)


class ShardedAdam:
    def __init__(self, model, rank):
        self.model, self.rank = model, rank
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        mine = [p for i, p in enumerate(self.trainable) if self.owner(i) == rank.rank]
        self.inner = torch.optim.Adam(mine, lr=LR, eps=1e-4)

    def owner(self, index):
        return index % self.rank.world_size

    def zero_grad(self):
        for p in self.trainable:
            p.grad = None

    def reduce(self):
        for p in self.trainable:
            dist.all_reduce(p.grad)
            p.grad /= self.rank.world_size

    @torch.no_grad()
    def step(self):
        self.reduce()
        self.inner.step()
        for index, p in enumerate(self.model.parameters()):
            dist.broadcast(p.data, src=self.owner(index))


class Training:
    def __init__(self, model, rank):
        self.model = model
        self.optimizer = ShardedAdam(model, rank)

    def __call__(self, shard):
        self.optimizer.zero_grad()
        loss(self.model, shard).backward()
        self.optimizer.step()


case = Case(model=Scorer, batch=applicants, loss=loss, layout="1x2")
step = Training
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
