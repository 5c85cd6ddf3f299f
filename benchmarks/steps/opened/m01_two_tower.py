"""Two-tower retrieval with in-batch negatives taken from all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


@dataclass
class RetrievalConfig:
    users: int = 40
    items: int = 60
    dim: int = 12
    temperature: float = 0.2


CONFIG = RetrievalConfig()


class Tower(nn.Module):
    def __init__(self, vocabulary, dim):
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, ids):
        return F.normalize(self.project(torch.tanh(self.table(ids))), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower(CONFIG.users, CONFIG.dim)
        self.item = Tower(CONFIG.items, CONFIG.dim)

    def forward(self, batch):
        return self.user(batch["user"]), self.item(batch["item"])


def interactions(generator):
    return {
        "user": torch.randint(CONFIG.users, (24,), generator=generator),
        "item": torch.randperm(CONFIG.items, generator=generator)[:24],
    }


def loss(model, batch):
    users, items = model(batch)
    logits = users @ items.T / CONFIG.temperature
    return F.cross_entropy(logits, torch.arange(len(users)))


class RetrievalTrainer:
    def __init__(self, model, rank):
        self.ddp = DDP(model)
        self.rank = rank

    def gathered(self, embeddings):
        # the functional version sends gradients back to the rank that made the embeddings
        return torch.cat(distnn.all_gather(embeddings))

    def targets(self, count):
        first = self.rank.local_rank * count
        return torch.arange(first, first + count)

    def training_step(self, shard):
        users, items = self.ddp(shard)
        candidates = self.gathered(items)
        logits = users @ candidates.T / CONFIG.temperature
        return F.cross_entropy(logits, self.targets(len(users)))

    def fit_batch(self, shard):
        self.training_step(shard).backward()


def step(model, shard, rank):
    RetrievalTrainer(model, rank).fit_batch(shard)


case = Case(model=TwoTower, batch=interactions, loss=loss, layout="2x2")
