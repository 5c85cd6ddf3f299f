"""Language modelling with warm-up: AdamW, a lambda schedule, two micro-batches per update."""
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, LENGTH, WARMUP, MICRO, UPDATES = 13, 7, 8, 2, 3


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.position = nn.Parameter(torch.randn(LENGTH, 12) * 0.1)
        self.mix = nn.Linear(12, 12)
        self.out = nn.Linear(12, VOCAB)

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.position
        before = hidden.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        return self.out(torch.tanh(self.mix(before)))


def make_batch(generator):
    text = torch.randint(0, VOCAB, (8 * UPDATES, LENGTH + 1), generator=generator)
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def loss(model, batch):
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def warmup(step):
    return min(1.0, (step + 1) / WARMUP)


def make_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    return [optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)]


class Engine:
    """Counts micro-steps; knows when one update is complete."""

    def __init__(self, model, rank):
        self.ddp = DDP(model)
        self.optimizer, self.scheduler = make_optimizer(self.ddp.parameters())
        self.micro_steps = 0

    @property
    def at_boundary(self):
        return (self.micro_steps + 1) % MICRO == 0

    def backward(self, batch):
        with nullcontext() if self.at_boundary else self.ddp.no_sync():
            (loss(self.ddp, batch) / MICRO).backward()

    def step(self):
        if self.at_boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()
        self.micro_steps += 1

    def __call__(self, shard):
        inputs, targets = shard["inputs"].chunk(MICRO), shard["targets"].chunk(MICRO)
        for x, y in zip(inputs, targets):
            self.backward({"inputs": x, "targets": y})
            self.step()


step = Engine
case = Case(model=TinyLM, batch=make_batch, loss=loss)
options = {"compare": "update", "optimizer": make_optimizer, "steps": UPDATES}
