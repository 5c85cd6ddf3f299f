"""Load forecasting with a warm-up schedule and two micro-batches per optimizer step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ddp_equivalence import Case

STEPS, BIG_BATCH, MICRO_BATCHES, WARMUP = 4, 8, 2, 4


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, history):
        return self.out(self.lstm(history)[0][:, -1])


def series(generator):
    return {
        "history": torch.randn(STEPS * BIG_BATCH, 6, 3, generator=generator),
        "future": torch.randn(STEPS * BIG_BATCH, 2, generator=generator),
    }


def loss(model, batch):
    return F.l1_loss(model(batch["history"]), batch["future"])


def warmup(step):
    return min(1.0, (step + 1) / WARMUP)


def make_optimizer(parameters):
    sgd = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    return [sgd, LambdaLR(sgd, warmup)]


class Loop:
    def __init__(self, model, world_size):
        self.ddp = DistributedDataParallel(model)
        self.optimizer, self.scheduler = make_optimizer(list(model.parameters()))
        self.micro_size = BIG_BATCH // world_size // MICRO_BATCHES
        self.batches_seen = 0

    def micro_batches(self, data):
        for first in range(0, len(data["future"]), self.micro_size):
            yield {name: value[first : first + self.micro_size] for name, value in data.items()}

    def training_batch(self, batch):
        (loss(self.ddp, batch) / MICRO_BATCHES).backward()
        self.batches_seen += 1
        if self.batches_seen % MICRO_BATCHES == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()

    def fit(self, data):
        for batch in self.micro_batches(data):
            self.training_batch(batch)


def step(model, data, rank):
    Loop(model, rank.world_size).fit(data)


case = Case(model=Forecaster, batch=series, loss=loss)
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
