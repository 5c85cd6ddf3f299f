"""Credit scoring on a table, with gradients exchanged in flat buckets of limited size."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F

from ddp_equivalence import Case

BUCKET = 120  # elements


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.city = nn.Embedding(12, 4)
        self.job = nn.Embedding(8, 4)
        self.first = nn.Linear(4 + 4 + 5, 16)
        self.second = nn.Linear(16, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, batch):
        x = torch.cat([self.city(batch["city"]), self.job(batch["job"]), batch["numbers"]], dim=1)
        x = F.relu(self.first(x))
        return self.last(torch.tanh(self.second(x))).squeeze(1)


def applicants(generator):
    n = 20
    return {
        "city": torch.randint(0, 12, (n,), generator=generator),
        "job": torch.randint(0, 8, (n,), generator=generator),
        "numbers": torch.randn(n, 5, generator=generator),
        "default": (torch.rand(n, generator=generator) < 0.3).double(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["default"])


class BucketedReducer:
    def __init__(self, world_size, limit=BUCKET):
        self.world_size = world_size
        self.limit = limit
        self.waiting = []
        self.size = 0

    def add(self, grad):
        if self.size + grad.numel() > self.limit and self.waiting:
            self.flush()
        self.waiting.append(grad)
        self.size += grad.numel()

    def flush(self):
        flat = _flatten_dense_tensors(self.waiting)
        dist.all_reduce(flat)
        flat.div_(self.world_size)
        for grad, mean in zip(self.waiting, _unflatten_dense_tensors(flat, self.waiting)):
            grad.copy_(mean)
        self.waiting, self.size = [], 0

    def reduce(self, parameters):
        # last layers first, as backward finishes them
        for parameter in reversed(list(parameters)):
            if parameter.grad is not None:
                self.add(parameter.grad)
        if self.size >= self.limit:
            self.flush()


def step(model, shard, rank):
    loss(model, shard).backward()
    BucketedReducer(rank.world_size).reduce(model.parameters())


case = Case(model=Scorer, batch=applicants, loss=loss, layout="1x2")
