from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Config:
    vocab: int = 31
    length: int = 9
    global_batch: int = 16
    gpus_per_node: int = 2
    width: int = 12


CFG = Config()


@dataclass(frozen=True)
class Reader:
    """Which part of the stream a process reads."""

    index: int
    count: int

    @classmethod
    def of(cls, rank: Rank) -> "Reader":
        node = rank.rank // CFG.gpus_per_node
        nodes = rank.world_size // CFG.gpus_per_node
        return cls(node, nodes)


class Stream(IterableDataset):
    """Lines of a long file; every reader keeps each count-th of them."""

    def __init__(self, lines: torch.Tensor, reader: Reader):
        self.lines, self.reader = lines, reader

    def __iter__(self):
        for number, line in enumerate(self.lines):
            if number % self.reader.count == self.reader.index:
                yield line


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(CFG.vocab, CFG.width)
        self.rnn = nn.GRU(CFG.width, CFG.width, batch_first=True)
        self.head = nn.Linear(CFG.width, CFG.vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def lm_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_lines(generator):
    return torch.randint(0, CFG.vocab, (CFG.global_batch, CFG.length), generator=generator)


case = Case(model=CharModel, batch=make_lines, loss=lm_loss, layout="2x2", shards="own")


def make_loader(lines, rank):
    per_rank = CFG.global_batch // rank.world_size
    return DataLoader(Stream(lines, Reader.of(rank)), batch_size=per_rank, drop_last=True)


def step(model, lines, rank):
    ddp = DDP(model)
    ids = next(iter(make_loader(lines, rank)))
    lm_loss(ddp, ids).backward()
