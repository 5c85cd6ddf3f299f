"""A language model of bytes with gradient accumulation under DistributedDataParallel."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    vocab: int = 40
    width: int = 12
    context: int = 7
    accumulate: int = 3
    rows: int = 2
    steps: int = 2
    lr: float = 0.01
    betas: tuple = (0.9, 0.95)


config = Config()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.SiLU(), nn.Linear(24, width))

    def forward(self, x):
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        y = self.norm(x)
        x = x + self.attend(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(config.vocab, config.width)
        self.block = Block(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids):
        return self.head(self.block(self.words(ids)))


def text(generator):
    n = 2 * config.rows * config.accumulate * config.steps
    return {"ids": torch.randint(0, config.vocab, (n, config.context), generator=generator)}


def loss(model, batch):
    ids = batch["ids"]
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, eps=1e-4)


class Trainer:
    def __init__(self, model, rank):
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(model.parameters())
        self.iteration = 0

    def quiet(self):
        """Whether the exchange is left out in this iteration."""
        return self.iteration % config.accumulate != 0

    def micro_step(self, rows):
        context = self.ddp.no_sync() if self.quiet() else nullcontext()
        with context:
            (loss(self.ddp, {"ids": rows}) / config.accumulate).backward()
        self.iteration += 1

    def __call__(self, shard):
        for rows in shard["ids"].split(config.rows):
            self.micro_step(rows)
        self.optimizer.step()
        self.optimizer.zero_grad()


case = Case(model=LM, batch=text, loss=loss, layout="1x2")
step = Trainer
options = {"compare": "update", "optimizer": make_optimizer, "steps": config.steps}
