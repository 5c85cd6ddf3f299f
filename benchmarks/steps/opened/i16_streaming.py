"""Streaming recognition: chunks of audio with the recurrent state that the chunks before them left."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FEATURES, HIDDEN, UNITS = 5, 7, 11


class Streaming(nn.Module):
    """An LSTM cell whose state lives in buffers, one row for each stream."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, HIDDEN)
        self.units = nn.Linear(HIDDEN, UNITS)
        self.register_buffer("hidden", torch.zeros(1, HIDDEN), persistent=False)
        self.register_buffer("memory", torch.zeros(1, HIDDEN), persistent=False)

    def resume(self, hidden, memory):
        self.hidden = hidden.detach().clone()
        self.memory = memory.detach().clone()

    def forward(self, chunk):
        hidden, memory = self.hidden, self.memory
        outputs = []
        for frame in chunk.unbind(1):
            hidden, memory = self.cell(frame, (hidden, memory))
            outputs.append(self.units(hidden))
        return torch.stack(outputs, dim=1)


def streams(generator):
    return {
        "chunk": torch.randn(8, 4, FEATURES, generator=generator),
        "hidden": torch.randn(8, HIDDEN, generator=generator).tanh(),
        "memory": torch.randn(8, HIDDEN, generator=generator),
        "units": torch.randint(UNITS, (8, 4), generator=generator),
    }


def nll(logits, units):
    return F.cross_entropy(logits.flatten(0, 1), units.flatten())


def loss(model, batch):
    model.resume(batch["hidden"], batch["memory"])
    return nll(model(batch["chunk"]), batch["units"])


class Recogniser:
    def __init__(self, network):
        network.resume(*(torch.zeros(1, HIDDEN).to(network.units.weight) for _ in range(2)))
        self.network = network
        self.ddp = DistributedDataParallel(network, bucket_cap_mb=1)

    def __call__(self, chunk, hidden, memory):
        self.network.resume(hidden, memory)
        return self.ddp(chunk)


def step(model, shard, rank):
    recogniser = Recogniser(model)
    logits = recogniser(shard["chunk"], shard["hidden"], shard["memory"])
    nll(logits, shard["units"]).backward()


case = Case(model=Streaming, batch=streams, loss=loss, layout="1x2")
