"""Fraud detection on tabular rows: the rare class is weighted by its inverse frequency."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


def build():
    return nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 1), nn.Flatten(0))


def make_batch(generator):
    n = 24
    x = torch.randn(n, 9, generator=generator)
    fraud = torch.zeros(n)
    fraud[[0, 2, 3, 7, 17]] = 1.0
    return {"x": x, "fraud": fraud}


def positive_weight(fraud):
    positives = fraud.sum().clamp(min=1)
    return (fraud.numel() - positives) / positives


def weighted(logits, fraud, weight):
    return F.binary_cross_entropy_with_logits(logits, fraud, pos_weight=weight)


def loss(model, batch):
    return weighted(model(batch["x"]), batch["fraud"], positive_weight(batch["fraud"]))


class Statistics:
    """Label counts of the step, for the weights and for the log."""

    def __init__(self):
        self.history = []

    def update(self, fraud):
        counts = torch.stack([fraud.sum(), torch.tensor(float(fraud.numel()), dtype=fraud.dtype)])
        dist.all_reduce(counts)
        self.history.append(counts[0] / counts[1])
        return counts


class Trainer:
    callbacks = ()

    def __init__(self, model):
        self.model = DDP(model)
        self.statistics = Statistics()

    def compute_loss(self, rows):
        self.statistics.update(rows["fraud"])
        weight = positive_weight(rows["fraud"])
        return weighted(self.model(rows["x"]), rows["fraud"], weight)

    def training_step(self, rows):
        value = self.compute_loss(rows)
        for callback in self.callbacks:
            callback(value)
        value.backward()
        return value.detach()


def step(model, shard, rank):
    Trainer(model).training_step(shard)


case = Case(model=build, batch=make_batch, loss=loss)
