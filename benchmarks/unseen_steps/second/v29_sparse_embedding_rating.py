"""Matrix factorisation with sparse gradients; ratings without weight are not counted."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

USERS, ITEMS, WIDTH, EXAMPLES = 12, 18, 5, 20


class Factorisation(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, 1)

    def forward(self, user, item):
        return self.mix(self.users(user) * self.items(item)).squeeze(-1)


def summed_loss(model, batch):
    error = model(batch["user"], batch["item"]) - batch["rating"]
    return (batch["weight"] * error.square()).sum()


def loss(model, batch):
    return summed_loss(model, batch) / batch["weight"].sum()


def make_batch(generator):
    return {
        "user": torch.randint(USERS, (EXAMPLES,), generator=generator),
        "item": torch.randint(ITEMS, (EXAMPLES,), generator=generator),
        "rating": torch.randn(EXAMPLES, generator=generator),
        "weight": torch.rand(EXAMPLES, generator=generator),
    }


case = Case(model=Factorisation, batch=make_batch, loss=loss, layout="1x2")


def scale_gradients(parameters, factor):
    for parameter in parameters:
        if parameter.grad.is_sparse:
            parameter.grad.coalesce().values().mul_(factor)
        else:
            parameter.grad.mul_(factor)


def sum_gradients(parameters):
    for parameter in parameters:
        if parameter.grad.is_sparse:
            # gloo sums sparse tensors too, but a table this small is sent as it is
            parameter.grad = parameter.grad.to_dense()
        dist.all_reduce(parameter.grad)


class WeightedTrainer:
    """Sums over the ranks; the divisor is the weight of all of them, known after the forward."""

    def __init__(self, model):
        self.model = model
        self.parameters = list(model.parameters())

    def total_weight(self, batch):
        total = batch["weight"].sum()
        dist.all_reduce(total)
        return total.item()

    def accumulate(self, batch):
        summed_loss(self.model, batch).backward()
        scale_gradients(self.parameters, 1.0 / self.total_weight(batch))
        sum_gradients(self.parameters)


def step(model, shard, rank):
    WeightedTrainer(model).accumulate(shard)
