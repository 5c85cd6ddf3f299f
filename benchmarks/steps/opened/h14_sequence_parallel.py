"""Long sequences: every rank reads a part of each of them, and fetches the keys and values of all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH, TEXTS = 13, 8, 12, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, start, exchange):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = exchange(k), exchange(v)
        at = torch.arange(start, start + x.shape[1])
        allowed = torch.arange(k.shape[1]) <= at[:, None]
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~allowed, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, start=0, exchange=lambda x: x):
        places = torch.arange(start, start + words.shape[1])
        x = self.words(words) + self.places(places)
        return self.head(self.attention(x, start, exchange))


class Exchange(torch.autograd.Function):
    """Puts the stretches of all ranks in a row."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Part:
    """The stretch of the sequences that is this rank's."""

    def __init__(self, rank, length=LENGTH):
        size = length // rank.world_size
        self.start = rank.rank * size
        self.stop = self.start + size
        self.last = rank.rank == rank.world_size - 1

    def inputs(self, words):
        return words[:, self.start : self.stop]

    def targets(self, words):
        """The words that follow; nothing follows the last of all."""
        following = words[:, self.start + 1 : self.stop]
        return following

    @staticmethod
    def exchange(x):
        return Exchange.apply(x.contiguous())


def texts(generator):
    return {"words": torch.randint(0, WORDS, (TEXTS, LENGTH), generator=generator)}


def loss(model, batch):
    logits = model(batch["words"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["words"][:, 1:].flatten())


case = Case(model=Lm, batch=texts, loss=loss, layout="1x2", shards="own")


def step(model, batch, rank):
    words, part = batch["words"], Part(rank)
    logits = model(part.inputs(words), part.start, part.exchange)
    targets = part.targets(words)
    count = torch.tensor(targets.numel())
    dist.all_reduce(count)
    logits = logits[:, : targets.shape[1]].flatten(0, 1)
    (F.cross_entropy(logits, targets.flatten(), reduction="sum") / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
