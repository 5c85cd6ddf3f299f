"""Tensor hooks weigh the gradients of ranks that hold different numbers of examples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MICRO_BATCHES = 2


def build_model():
    return nn.Sequential(nn.Linear(5, 9), nn.Softplus(), nn.Linear(9, 2))


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator):
    x = torch.randn(16, 5, generator=generator)
    y = torch.stack([x.norm(dim=1), x.sum(1)], dim=1)
    return {"x": x, "y": y}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2", shards="12+4")


def count_examples(count, device):
    total = torch.tensor(float(count), device=device)
    dist.all_reduce(total)
    return int(total)


def micro_batches(batch, parts):
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    for index in range(parts):
        yield {name: pieces[index] for name, pieces in chunks.items()}


class WeightedTrainer:
    """A rank's gradient counts as much as its share of the examples."""

    def __init__(self, model):
        self.model = model
        self.params = [p for p in model.parameters() if p.requires_grad]

    def backward(self, value, weight):
        for p in self.params:
            p.register_hook(lambda grad: grad * weight)
        value.backward()

    def all_reduce(self):
        for p in self.params:
            dist.all_reduce(p.grad)

    def train_step(self, batch):
        own = len(batch["x"])
        weight = own / count_examples(own, batch["x"].device)
        self.model.zero_grad()
        for micro in micro_batches(batch, MICRO_BATCHES):
            value = loss(self.model, micro) / MICRO_BATCHES
            self.backward(value, weight)
        self.all_reduce()


def step(model, shard, rank):
    WeightedTrainer(model).train_step(shard)
