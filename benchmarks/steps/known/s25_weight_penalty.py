"""Weighted regression with a penalty on the weights; gradients are summed over the ranks."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

PENALTY = 0.05


def build_model():
    return nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 2))


def squared_errors(model, batch):
    """The sum over examples of their weighted squared errors."""
    errors = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
    return (batch["weight"] * errors).sum()


def penalty(model):
    return PENALTY * sum(p.square().sum() for p in model.parameters() if p.dim() > 1)


def loss(model, batch):
    return squared_errors(model, batch) / batch["weight"].sum() + penalty(model)


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randn(12, 2, generator=generator),
        "weight": torch.rand(12, generator=generator) + 0.5,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1+2")


class Trainer:
    """Each rank has a part of the sum; adding the gradients gives that of the whole."""

    def __init__(self, model, rank):
        self.model = model
        self.rank = rank

    def total_weight(self, batch):
        total = batch["weight"].sum()
        dist.all_reduce(total)
        return total

    def compute_loss(self, batch):
        data_term = squared_errors(self.model, batch) / self.total_weight(batch)
        weight_term = penalty(self.model)
        return data_term + weight_term

    def sum_gradients(self):
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.model.parameters()]
        for work in works:
            work.wait()

    def train_step(self, batch):
        self.model.zero_grad()
        value = self.compute_loss(batch)
        value.backward()
        self.sum_gradients()


def step(model, shard, rank):
    Trainer(model, rank).train_step(shard)
