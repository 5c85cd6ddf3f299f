"""A GRU that reads its sequences in chunks, to save memory in long sequences."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LENGTH = 8
CHUNK = 4


class Forecaster(nn.Module):
    def __init__(self, inputs=3, hidden=7):
        super().__init__()
        self.rnn = nn.GRU(inputs, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, series, state=None):
        hidden, state = self.rnn(series, state)
        return self.out(hidden).squeeze(2), state


def loss(model, batch):
    predicted, _ = model(batch["series"])
    return F.mse_loss(predicted, batch["targets"])


def make_batch(generator):
    series = torch.randn(8, LENGTH, 3, generator=generator)
    return {"series": series, "targets": series.cumsum(dim=1).mean(dim=2)}


case = Case(model=Forecaster, batch=make_batch, loss=loss, layout="1x2")


def repackage(state):
    """A new tensor with the values of the hidden state."""
    return None if state is None else state.detach()


class SequenceTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)

    def predict(self, series):
        state = None
        outputs = []
        for chunk in series.split(CHUNK, dim=1):
            state = repackage(state)
            predicted, state = self.ddp(chunk, state)
            outputs.append(predicted)
        return torch.cat(outputs, dim=1)

    def train_step(self, batch):
        self.ddp.zero_grad()
        predicted = self.predict(batch["series"])
        value = F.mse_loss(predicted, batch["targets"])
        value.backward()
        return value.detach()


def step(model, shard, rank):
    trainer = SequenceTrainer(model)
    trainer.train_step(shard)
