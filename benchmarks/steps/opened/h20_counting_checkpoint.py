"""A model that counts its tokens as it reads them, with activation checkpoints."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

WORDS, WIDTH, PAD = 11, 8, 0


class Block(nn.Module):
    """A gated mixture with the word before. Counts real words."""

    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.read = 0

    def forward(self, x, real):
        self.read = self.read + real.sum()
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        mixed = torch.tanh(self.value(torch.cat([x, before], -1)))
        return x + torch.sigmoid(self.gate(x)) * mixed * real.unsqueeze(-1)


class Tagger(nn.Module):
    def __init__(self, tags=4, depth=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.tags = nn.Linear(WIDTH, tags)

    def forward(self, words, save_memory=False):
        x, real = self.words(words), words != PAD
        for block in self.blocks[:-1]:
            x = block(x, real)
        if save_memory:
            x = checkpoint(self.blocks[-1], x, real, use_reentrant=False)
        else:
            x = self.blocks[-1](x, real)
        return self.tags(x)


class Counted:
    """Divides gradients by the words that have been read meanwhile, on all ranks."""

    def __init__(self, model, block):
        self.model, self.block = model, block

    def __enter__(self):
        self.block.read = 0

    def __exit__(self, *_):
        count = self.block.read.clone()
        dist.all_reduce(count)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= count


def summed(logits, tags):
    return F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=-1, reduction="sum")


def sentences(generator):
    length = torch.randint(2, 10, (8, 1), generator=generator)
    words = torch.randint(1, WORDS, (8, 9), generator=generator)
    real = torch.arange(9) < length
    return words.where(real, PAD), (words % 4).where(real, -1)


def loss(model, batch):
    words, tags = batch
    return summed(model(words), tags) / (tags >= 0).sum()


case = Case(model=Tagger, batch=sentences, loss=loss, layout="1x2")


def step(model, shard, rank):
    words, tags = shard
    with Counted(model, model.blocks[-1]):
        summed(model(words, save_memory=True), tags).backward()
