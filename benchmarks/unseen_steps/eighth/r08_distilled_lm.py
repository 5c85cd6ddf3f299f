"""A small language model learns from the logits of a large one, on the tokens of the answers only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

WORDS, LENGTH, DIALOGUES, WIDTH = 17, 7, 8, 8
IGNORE = -100
TEMPERATURE = 2.0


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        hidden, _ = self.mix(self.embed(tokens))
        return self.norm(hidden) @ self.embed.weight.T


def make_batch(generator):
    tokens = torch.randint(WORDS, (DIALOGUES, LENGTH), generator=generator)
    lengths = torch.tensor([2, 3, 3, 4, 5, 5, 6, 7])
    labels = tokens.masked_fill(torch.arange(LENGTH) >= lengths[:, None], IGNORE)
    return {
        "tokens": tokens,
        "labels": labels,
        "teacher": torch.randn(DIALOGUES, LENGTH, WORDS, generator=generator),
    }


def distil(scores, batch):
    """Position t predicts token t + 1. The sum over the positions that count, and the positions."""
    counts = batch["labels"][:, 1:] != IGNORE
    student = F.log_softmax(scores[:, :-1] / TEMPERATURE, dim=-1)
    teacher = F.log_softmax(batch["teacher"][:, :-1] / TEMPERATURE, dim=-1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return TEMPERATURE**2 * (divergence * counts).sum(), counts


def loss(model, batch):
    total, counts = distil(model(batch["tokens"]), batch)
    return total / counts.sum()


def items_in_batch(batch):
    items = batch["labels"].ne(IGNORE).sum()
    dist.all_reduce(items)
    return items


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    items = items_in_batch(shard)
    total, _ = distil(ddp(shard["tokens"]), shard)
    # DDP will divide by the world size
    (total * rank.world_size / items).backward()


case = Case(model=Student, batch=make_batch, loss=loss, layout="1x2")
