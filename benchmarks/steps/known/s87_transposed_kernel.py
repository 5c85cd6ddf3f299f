"""A layer that stores its kernel transposed, as in a checkpoint from another framework."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class Dense(nn.Module):
    """The kernel has inputs first in its shape, and outputs first in memory."""

    def __init__(self, inputs, outputs):
        super().__init__()
        stored = torch.randn(outputs, inputs) / inputs**0.5
        self.kernel = nn.Parameter(stored.t())
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.kernel + self.bias


class Ported(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = Dense(6, 9)
        self.norm = nn.LayerNorm(9)
        self.logits = nn.Linear(9, 4)

    def forward(self, x):
        return self.logits(F.relu(self.norm(self.dense(x))))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"], label_smoothing=0.1)


def make_batch(generator):
    return {
        "x": torch.randn(14, 6, generator=generator),
        "label": torch.randint(0, 4, (14,), generator=generator),
    }


case = Case(model=Ported, batch=make_batch, loss=loss, layout="2x1")


class Averager:
    """Starts all reductions at once, then waits for them in turn."""

    def __init__(self, world_size):
        self.world_size = world_size

    def start(self, grads):
        # the backend does not take tensors with gaps or with another order in memory
        return [dist.all_reduce(g.contiguous(), async_op=True) for g in grads]

    def __call__(self, params):
        grads = [p.grad for p in params if p.grad is not None]
        for g in grads:
            g.div_(self.world_size)
        for work in self.start(grads):
            work.wait()


def step(model, shard, rank):
    averager = Averager(rank.world_size)
    model.zero_grad()
    loss(model, shard).backward()
    averager(list(model.parameters()))
