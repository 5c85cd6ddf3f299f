"""A wide MLP for jet tagging whose hidden units are divided among the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

INPUTS, HIDDEN, TAGS = 8, 20, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(INPUTS, HIDDEN)
        self.down = nn.Linear(HIDDEN, TAGS)

    def forward(self, jets):
        return self.down(F.gelu(self.up(jets)))


def jets(generator):
    n = 16
    return {
        "jets": torch.randn(n, INPUTS, generator=generator),
        "tags": torch.randint(0, TAGS, (n,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["jets"]), batch["tags"])


class SumOfParts(torch.autograd.Function):
    """Adds the partial outputs of all ranks."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Slices:
    """The part of the model that belongs to a rank."""

    def __init__(self, model, rank):
        self.model = model
        width = HIDDEN // rank.world_size
        self.mine = slice(rank.rank * width, (rank.rank + 1) * width)

    def __call__(self, jets):
        up, down = self.model.up, self.model.down
        hidden = F.gelu(F.linear(jets, up.weight[self.mine], up.bias[self.mine]))
        return SumOfParts.apply(F.linear(hidden, down.weight[:, self.mine])) + down.bias

    def complete(self):
        """Puts together the gradients of the slices; that of the last bias is whole already."""
        for p in (self.model.up.weight, self.model.up.bias, self.model.down.weight):
            dist.all_reduce(p.grad)


def gathered(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def step(model, shard, rank):
    batch = {key: gathered(value) for key, value in shard.items()}
    slices = Slices(model, rank)
    loss(slices, batch).backward()
    slices.complete()


case = Case(model=Tagger, batch=jets, loss=loss, layout="1x2")
