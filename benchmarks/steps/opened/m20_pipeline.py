"""Weather downscaling with two pipeline stages on a node, and data parallelism over the nodes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MICRO_BATCHES, HIDDEN = 4, 11


class Downscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(7, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.upper = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))

    def forward(self, x):
        return self.upper(self.lower(x))


def grids(generator):
    return {
        "coarse": torch.randn(16, 7, generator=generator),
        "fine": torch.randn(16, 3, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["coarse"]), batch["fine"])


class Stage:
    """All forwards first, then all backwards."""

    def __init__(self, module, rank):
        self.module, self.rank = module, rank


class LowerStage(Stage):
    def run(self, micros):
        sent = []
        for micro in micros:
            activation = self.module(micro["coarse"])
            dist.send(activation.detach(), dst=self.rank + 1)
            sent.append(activation)
        for activation in sent:
            grad = torch.empty_like(activation)
            dist.recv(grad, src=self.rank + 1)
            activation.backward(grad)


class UpperStage(Stage):
    def run(self, micros):
        waiting = []
        for micro in micros:
            received = micro["coarse"].new_empty(len(micro["coarse"]), HIDDEN)
            dist.recv(received, src=self.rank - 1)
            received.requires_grad_()
            objective = F.mse_loss(self.module(received), micro["fine"]) / MICRO_BATCHES
            waiting.append((received, objective))
        # the newest activations are freed first
        while waiting:
            received, objective = waiting.pop()
            objective.backward()
            dist.send(received.grad, dst=self.rank - 1)


def share(model, rank):
    """Average over the nodes; every stage then hands its gradients to the other rank of the node."""
    for stage, module in enumerate((model.lower, model.upper)):
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            assert (rank.local_rank == stage) or not parameter.grad.any()
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.nodes


def step(model, batch, rank):
    mine = {name: value.chunk(rank.nodes)[rank.node] for name, value in batch.items()}
    chunks = {name: value.chunk(MICRO_BATCHES) for name, value in mine.items()}
    micros = [{name: chunks[name][i] for name in chunks} for i in range(MICRO_BATCHES)]
    if rank.local_rank == 0:
        LowerStage(model.lower, rank.rank).run(micros)
    else:
        UpperStage(model.upper, rank.rank).run(micros)
    share(model, rank)


case = Case(model=Downscaler, batch=grids, loss=loss, layout="2x2", shards="own")
