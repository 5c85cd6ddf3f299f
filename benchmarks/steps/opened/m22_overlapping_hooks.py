"""Satellite change detection: gradients are reduced by hooks while the backward still runs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ACCUMULATION = 2


class ChangeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(2, 5, 3, padding=1)
        self.compare = nn.Conv2d(5, 1, 1)

    def forward(self, before, after):
        difference = torch.relu(self.encoder(after)) - torch.relu(self.encoder(before))
        return self.compare(difference).squeeze(1)


def tiles(generator):
    return {
        "before": torch.randn(8, 2, 6, 6, generator=generator),
        "after": torch.randn(8, 2, 6, 6, generator=generator),
        "changed": torch.randint(2, (8, 6, 6), generator=generator).float(),
    }


def loss(model, batch):
    logits = model(batch["before"], batch["after"])
    return F.binary_cross_entropy_with_logits(logits, batch["changed"])


class OverlappedReducer:
    """Starts the all_reduce of a parameter as soon as its gradient is there."""

    def __init__(self, model, world_size):
        self.parameters = list(model.parameters())
        self.world_size = world_size
        self.pending = []
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self.launch)
            for parameter in self.parameters
        ]

    def launch(self, parameter):
        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def finish(self):
        for parameter in self.parameters:
            parameter.grad.div_(self.world_size)
        for handle in self.handles:
            handle.remove()


def micro_batches(batch):
    size = len(batch["changed"]) // ACCUMULATION
    for index in range(ACCUMULATION):
        yield {name: rows[index * size : (index + 1) * size] for name, rows in batch.items()}


def step(model, shard, rank):
    reducer = OverlappedReducer(model, rank.world_size)
    for micro in micro_batches(shard):
        (loss(model, micro) / ACCUMULATION).backward()
        reducer.wait()
    reducer.finish()


case = Case(model=ChangeNet, batch=tiles, loss=loss)
