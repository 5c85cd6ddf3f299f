"""All-reduce in two phases: exchange of slices with all-to-all, then a gather of the sums."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 6), nn.ELU(), nn.Linear(6, 6), nn.ELU())
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        return self.out(self.body(x))


def loss(model, batch):
    logits = model(batch["features"])
    return F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)


def make_batch(generator):
    return {
        "features": torch.randn(16, 7, generator=generator),
        "labels": torch.randint(0, 5, (16,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="2x2")


def padded_to(vector, multiple):
    missing = -vector.numel() % multiple
    return F.pad(vector, (0, missing))


def sliced_all_reduce(vector):
    """The mean of ``vector`` over the ranks. Each rank sums one slice of it."""
    world_size = dist.get_world_size()
    padded = padded_to(vector, world_size)

    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    mine = received.view(-1, world_size).sum(dim=1)
    mine = mine / world_size

    result = torch.empty_like(padded)
    dist.all_gather_into_tensor(result, mine)
    return result[: vector.numel()]


def sync_gradients(params):
    params = [p for p in params if p.grad is not None]
    vector = torch.cat([p.grad.flatten() for p in params])
    averaged = sliced_all_reduce(vector)
    sizes = [p.numel() for p in params]
    for p, piece in zip(params, averaged.split(sizes), strict=True):
        p.grad = piece.view_as(p).clone()


def step(model, shard, rank):
    model.zero_grad()
    loss(model, shard).backward()
    sync_gradients(model.parameters())
