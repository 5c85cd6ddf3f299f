"""Top-k compression with error feedback: what is not sent now is sent later, at last all of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MICRO_BATCHES = 3


def build():
    return nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2))


def telemetry(generator):
    signal = torch.randn(24, 7, generator=generator)
    return {"signal": signal, "load": signal[:, :2] * torch.linspace(0, 2, 24)[:, None]}


def loss(model, batch):
    return F.huber_loss(model(batch["signal"]), batch["load"])


class Compressor:
    def __init__(self, share):
        self.share = share
        self.memory = None

    def select(self, gradient):
        """The largest entries of gradient and memory; the memory keeps the others."""
        owed = gradient if self.memory is None else gradient + self.memory
        k = max(1, int(self.share * owed.numel()))
        indices = owed.abs().topk(k).indices
        sent = torch.zeros_like(owed)
        sent[indices] = owed[indices]
        self.memory = gradient - sent
        return sent

    def flush(self):
        rest, self.memory = self.memory, None
        return rest


class CompressedTraining:
    def __init__(self, model, world_size, share=0.1):
        self.model, self.world_size = model, world_size
        self.compressors = {name: Compressor(share) for name, _ in model.named_parameters()}
        self.sums = {name: torch.zeros_like(p).view(-1) for name, p in model.named_parameters()}

    def micro_step(self, micro):
        self.model.zero_grad()
        (loss(self.model, micro) / MICRO_BATCHES).backward()
        for name, parameter in self.model.named_parameters():
            self.add(name, self.compressors[name].select(parameter.grad.view(-1)))

    def add(self, name, piece):
        dist.all_reduce(piece)
        self.sums[name] += piece / self.world_size

    def finish(self):
        for name, parameter in self.model.named_parameters():
            self.add(name, self.compressors[name].flush())
            parameter.grad = self.sums[name].view_as(parameter)


def step(model, shard, rank):
    training = CompressedTraining(model, rank.world_size)
    pieces = {key: value.chunk(MICRO_BATCHES) for key, value in shard.items()}
    for i in range(MICRO_BATCHES):
        training.micro_step({key: value[i] for key, value in pieces.items()})
    training.finish()


case = Case(model=build, batch=telemetry, loss=loss, layout="1x2")
