"""Ranks read streams of different lengths; DDP's join keeps the longer ones going."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LR = 0.2
MICRO = 4
LENGTHS = (20, 8)  # rows in the stream of each rank


def build():
    return nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 2))


def stream_rows(generator):
    inputs = torch.randn(sum(LENGTHS), 4, generator=generator)
    return {
        "inputs": inputs,
        "targets": torch.sin(2 * inputs[:, :2]) + 0.5,
    }


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])


def stream(batch, rank):
    """The micro-batches of one rank's stream, in order."""
    first = sum(LENGTHS[:rank])
    for start in range(first, first + LENGTHS[rank], MICRO):
        yield {name: values[start : start + MICRO] for name, values in batch.items()}


def in_one_process(model, batch):
    """One device: each step takes the next micro-batch of every stream that still has one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    streams = [list(stream(batch, rank)) for rank in range(len(LENGTHS))]
    for number in range(max(map(len, streams))):
        parts = [micro_batches[number] for micro_batches in streams if number < len(micro_batches)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        optimizer.zero_grad()
        loss(model, joined).backward()
        optimizer.step()


class StreamTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=LR)
        self.steps = 0

    def update(self, micro_batch):
        self.optimizer.zero_grad()
        loss(self.ddp, micro_batch).backward()
        self.optimizer.step()
        self.steps += 1

    def fit(self, micro_batches):
        with self.ddp.join():
            for micro_batch in micro_batches:
                self.update(micro_batch)


def step(model, batch, rank):
    trainer = StreamTrainer(model)
    trainer.fit(stream(batch, rank.rank))


case = Case(model=build, batch=stream_rows, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "reference": in_one_process}
