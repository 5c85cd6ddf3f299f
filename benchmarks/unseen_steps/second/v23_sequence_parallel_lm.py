"""A causal language model whose sequences are split over the ranks; keys, values are gathered."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 11, 8, 12, 8


class GatherSequence(torch.autograd.Function):
    """Concatenates the chunks of all ranks along dim 1; every rank uses all of the result."""

    @staticmethod
    def forward(ctx, chunk):
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(chunks, chunk.contiguous())
        return torch.cat(chunks, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, positions, gather):
        key, value = gather(self.key_value(x)).chunk(2, dim=-1)
        scores = self.query(x) @ key.transpose(1, 2) / math.sqrt(x.size(-1))
        future = torch.arange(key.size(1))[None, :] > positions[:, None]
        return self.out(scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ value)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, first=0, gather=lambda x: x):
        positions = torch.arange(first, first + tokens.size(1))
        x = self.tokens(tokens) + self.positions(positions)
        x = x + self.attention(x, positions, gather)
        return self.head(self.norm(x))


def shifted_labels(tokens):
    """The next token at every position; the last position has none."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


def summed_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def loss(model, batch):
    labels = shifted_labels(batch["tokens"])
    return summed_loss(model(batch["tokens"]), labels) / (labels != -100).sum()


def make_batch(generator):
    return {"tokens": torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=generator)}


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x2", shards="own")


class SequenceParallelTrainer:
    def __init__(self, model):
        self.model = model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def split(self, batch):
        """This rank's stretch of every sequence, with its labels."""
        size = batch["tokens"].size(1) // self.world
        first = self.rank * size
        tokens = batch["tokens"][:, first : first + size]
        labels = shifted_labels(tokens)
        return tokens, labels, first

    def train_step(self, batch):
        tokens, labels, first = self.split(batch)
        count = (labels != -100).sum()
        dist.all_reduce(count)
        logits = self.model(tokens, first, GatherSequence.apply)
        (summed_loss(logits, labels) / count).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


def step(model, batch, rank):
    SequenceParallelTrainer(model).train_step(batch)
