"""A trainer that keeps a moving average of the weights, and watches its validation loss."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

AUXILIARY_GAIN = 0.4


class DeeplySupervised(nn.Module):
    """Has a second head for training, after the first layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.auxiliary = nn.Linear(8, 3)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        logits = self.head(torch.tanh(self.body(x)))
        return (logits, self.auxiliary(x)) if self.training else (logits,)


def loss(model, batch):
    x, labels = batch
    logits, *others = model(x)
    value = F.cross_entropy(logits, labels)
    for other in others:
        value = value + AUXILIARY_GAIN * F.cross_entropy(other, labels)
    return value


def make_batch(generator):
    return torch.randn(12, 6, generator=generator), torch.arange(12) % 3


case = Case(model=DeeplySupervised, batch=make_batch, loss=loss, layout="2x1")


class Trainer:
    def __init__(self, model, decay=0.99):
        self.model = model
        self.ema = deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update_average(self):
        for average, p in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            average.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def validate(self, batch):
        self.model.eval()
        return loss(self.ema, batch).item()

    def train_step(self, batch):
        self.model.zero_grad()
        loss(self.model, batch).backward()
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.update_average()


def step(model, shard, rank):
    trainer = Trainer(model)
    trainer.validate(shard)
    trainer.train_step(shard)
