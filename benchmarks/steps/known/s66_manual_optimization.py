"""A module with manual optimisation that accumulates gradients over a few micro-batches."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2))

    def forward(self, x):
        return self.net(x)


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {
        "x": torch.randn(20, 5, generator=generator),
        "y": torch.randn(20, 2, generator=generator),
    }


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1x2")


class RegressionModule:
    """What a user would write: training_step gets one micro-batch and returns its loss."""

    automatic_optimization = False

    def __init__(self, model, accumulate_grad_batches):
        self.strategy_model = DDP(model)
        self.accumulate_grad_batches = accumulate_grad_batches

    def training_step(self, batch, share):
        prediction = self.strategy_model(batch["x"])
        return F.smooth_l1_loss(prediction, batch["y"]) * share

    def should_sync(self, batch_idx, num_batches):
        # communication is only worth its price when the optimizer is about to step
        return (batch_idx + 1) % self.accumulate_grad_batches == 0

    def fit_window(self, batches):
        rows = sum(len(batch["x"]) for batch in batches)
        for batch_idx, batch in enumerate(batches):
            if self.should_sync(batch_idx, len(batches)):
                context = contextlib.nullcontext()
            else:
                context = self.strategy_model.no_sync()
            with context:
                self.training_step(batch, len(batch["x"]) / rows).backward()


def micro_batches(shard, size):
    pieces = {name: value.split(size) for name, value in shard.items()}
    count = len(pieces["x"])
    return [{name: pieces[name][i] for name in pieces} for i in range(count)]


def step(model, shard, rank):
    model.zero_grad()
    module = RegressionModule(model, accumulate_grad_batches=2)
    module.fit_window(micro_batches(shard, size=4))
