"""Molecular properties: a shared trunk on fingerprints, and one head for each property."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

BITS = 20
PROPERTIES = ("solubility", "toxicity", "binding")


class Chemist(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(BITS, 12), nn.SiLU(), nn.Linear(12, 8), nn.SiLU())
        self.heads = nn.ModuleDict({name: nn.Linear(8, 1) for name in PROPERTIES})

    def forward(self, fingerprints, which):
        shared = self.trunk(fingerprints)
        outputs = torch.zeros_like(shared[:, 0])
        for number, name in enumerate(PROPERTIES):
            rows = (which == number).nonzero().squeeze(1)
            if len(rows):
                outputs = outputs.index_copy(0, rows, self.heads[name](shared[rows]).squeeze(1))
        return outputs


def assays(generator):
    # Sorted by assay, as they come from the database.
    which = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    return {
        "fingerprints": (torch.rand(12, BITS, generator=generator) < 0.3).float(),
        "which": which,
        "value": torch.randn(12, generator=generator) + which,
    }


def loss(model, batch):
    return (model(batch["fingerprints"], batch["which"]) - batch["value"]).square().mean()


class Bucket:
    def __init__(self, parameters):
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype)
        self.used = torch.zeros(len(parameters), dtype=torch.long)

    def views(self):
        return zip(self.parameters, self.flat.split([p.numel() for p in self.parameters]))

    def fill(self):
        for number, (parameter, view) in enumerate(self.views()):
            if parameter.grad is not None:
                view.copy_(parameter.grad.flatten())
                self.used[number] = 1

    def reduce(self):
        """Like DDP with unused parameters: what no rank has used keeps no gradient at all."""
        dist.all_reduce(self.flat)
        dist.all_reduce(self.used)
        for (parameter, view), users in zip(self.views(), self.used.tolist()):
            if users:
                parameter.grad = (view / users).view_as(parameter)


def buckets_of(parameters, limit):
    bucket, size = [], 0
    for parameter in parameters:
        if bucket and size + parameter.numel() > limit:
            yield Bucket(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield Bucket(bucket)


def step(model, shard, rank):
    loss(model, shard).backward()
    for bucket in buckets_of(reversed(list(model.parameters())), limit=128):
        bucket.fill()
        bucket.reduce()


case = Case(model=Chemist, batch=assays, loss=loss)
