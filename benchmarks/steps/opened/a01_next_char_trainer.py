"""Small decoder-only character model. The loss is the mean over every predicted character.

We went from "mean per rank" to "mean over all characters" because short documents
dominated the gradient.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    vocab: int = 31
    width: int = 16
    length: int = 12
    documents: int = 8
    ignore: int = -100


CFG = Config()


class Decoder(nn.Module):
    def __init__(self, cfg: Config = CFG):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.width)
        self.positions = nn.Embedding(cfg.length, cfg.width)
        self.mix = nn.GRU(cfg.width, cfg.width, batch_first=True)
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.mix(x)[0]))


def documents(generator):
    ids = torch.randint(1, CFG.vocab, (CFG.documents, CFG.length), generator=generator)
    lengths = torch.tensor([3, 11, 5, 12, 7, 4, 12, 9])
    real = torch.arange(CFG.length) < lengths[:, None]
    return {"ids": ids * real, "labels": ids.masked_fill(~real, CFG.ignore)}


class Objective:
    """Sum of the negative log likelihood and the number it is to be divided by."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def total(self, logits, labels):
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, self.cfg.vocab),
            labels[:, 1:].reshape(-1),
            ignore_index=self.cfg.ignore,
            reduction="sum",
        )

    def count(self, labels):
        return labels.ne(self.cfg.ignore).sum()


class Trainer:
    def __init__(self, model, cfg: Config = CFG):
        self.model = DDP(model)
        self.objective = Objective(cfg)

    def normaliser(self, labels):
        count = self.objective.count(labels)
        dist.all_reduce(count, op=dist.ReduceOp.SUM)
        return count.clamp(min=1)

    def training_step(self, batch):
        logits = self.model(batch["ids"])
        total = self.objective.total(logits, batch["labels"])
        loss = total / self.normaliser(batch["labels"])
        # DDP takes the mean over ranks
        loss = loss * dist.get_world_size()
        loss.backward()
        return loss.detach()


def loss(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


case = Case(model=Decoder, batch=documents, loss=loss, layout="1x2")


def step(model, shard, rank):
    Trainer(model).training_step(shard)
