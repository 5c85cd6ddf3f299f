"""Ratings of films. Few rows of the tables are touched in a step, so only those are sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

USERS, FILMS, RANK = 30, 12, 4


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, RANK)
        self.film = nn.Embedding(FILMS, RANK)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, user, film):
        return (self.user(user) * self.film(film)).sum(-1) + self.bias


def ratings(generator):
    return {
        "user": torch.randint(0, USERS, (20,), generator=generator),
        "film": torch.randint(0, FILMS, (20,), generator=generator),
        "stars": torch.randint(1, 6, (20,), generator=generator).float() - 3,
    }


def loss(model, batch):
    return F.mse_loss(model(batch["user"], batch["film"]), batch["stars"])


def gather_padded(tensor, world_size, length):
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return parts


def sparse_mean(dense, world_size):
    """The mean of a gradient over ranks; only rows with something in them travel."""
    touched = dense.abs().sum(1).nonzero().squeeze(1)
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(touched)]))
    length = int(max(counts))
    if length * world_size > 4 * len(dense):  # not worth it
        dist.all_reduce(dense)
        return dense / world_size
    rows = gather_padded(dense[touched], world_size, length)
    ids = gather_padded(touched, world_size, length)
    keep = [slice(0, int(count)) for count in counts]
    ids = torch.cat([part[k] for part, k in zip(ids, keep, strict=True)])
    rows = torch.cat([part[k] for part, k in zip(rows, keep, strict=True)])
    result = torch.zeros_like(dense)
    result[ids] += rows
    return result / world_size


def step(model, shard, rank):
    loss(model, shard).backward()
    for module in model.children():
        module.weight.grad = sparse_mean(module.weight.grad, rank.world_size)
    dist.all_reduce(model.bias.grad)
    model.bias.grad /= rank.world_size


case = Case(model=Factors, batch=ratings, loss=loss, layout="1x2")
