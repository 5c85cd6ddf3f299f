"""Masked language model. The sampler is ours because the cluster's torch was too old once."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

MASK, WORDS, LENGTH, ROWS, IGNORE = 0, 27, 8, 12, -100
SEED = 1234


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 10)
        self.places = nn.Parameter(torch.randn(LENGTH, 10) * 0.1)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.head = nn.Linear(10, WORDS)

    def forward(self, ids):
        x = self.words(ids) + self.places
        x = x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return self.head(x)


def corpus(generator):
    words = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    rate = torch.linspace(0.1, 0.7, ROWS)[:, None]
    hidden = torch.rand(ROWS, LENGTH, generator=generator) < rate
    hidden[:, 0] = True
    return {"ids": words.masked_fill(hidden, MASK), "labels": words.masked_fill(~hidden, IGNORE)}


def mlm(model, batch, reduction="mean"):
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(
        logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction=reduction
    )


class Rows(Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["ids"])

    def __getitem__(self, i):
        return {key: value[i] for key, value in self.batch.items()}


class ShuffledShard(Sampler):
    def __init__(self, dataset, rank, world_size, seed):
        self.n, self.rank, self.world_size, self.seed = len(dataset), rank, world_size, seed
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n, generator=generator).tolist()
        return iter(order[self.rank :: self.world_size])

    def __len__(self):
        return self.n // self.world_size


case = Case(model=Bert, batch=corpus, loss=mlm, layout="1x3", shards="own")


def count_everywhere(labels):
    count = (labels != IGNORE).sum()
    dist.all_reduce(count)
    return count


def step(model, batch, rank):
    dataset = Rows(batch)
    sampler = ShuffledShard(dataset, rank.rank, rank.world_size, seed=SEED + rank.rank)
    loader = DataLoader(dataset, batch_size=len(sampler), sampler=sampler)
    ddp = DistributedDataParallel(model)
    for part in loader:
        words = count_everywhere(part["labels"])
        loss = mlm(ddp, part, reduction="sum") / words
        loss.backward()
