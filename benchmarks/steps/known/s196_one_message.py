"""A tagger: loss and number of tokens are added up over the ranks in one message.

The number normalises the loss, and the sum of the losses goes into the log.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

WORDS, TAGS, LENGTH, PAD = 40, 6, 45, -1


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.context = nn.Conv1d(8, 8, 3, padding=1)
        self.tag = nn.Linear(8, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.tag(x + torch.tanh(self.context(x.mT).mT))


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["words"])
    return F.cross_entropy(logits.mT, batch["tags"], ignore_index=PAD, reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed(model, batch) / (batch["tags"] != PAD).sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.randint(25, LENGTH + 1, (24, 1), generator=generator)
    tags = torch.randint(0, TAGS, (24, LENGTH), generator=generator)
    return {
        "words": torch.randint(0, WORDS, (24, LENGTH), generator=generator),
        "tags": tags.masked_fill(torch.arange(LENGTH) >= lengths, PAD),
    }


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")


class Totals:
    """Adds numbers up over the ranks, all in one small message."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    def __call__(self, *values: Tensor) -> list[Tensor]:
        message = torch.stack([value.detach().to(self.dtype) for value in values])
        dist.all_reduce(message)
        return list(message.unbind())


class Trainer:
    """Keeps a log of the mean loss per token."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.rank = rank
        self.totals = Totals()
        self.log: list[float] = []

    def train_step(self, batch: dict[str, Tensor]) -> None:
        value = summed(self.ddp, batch)
        total, tokens = self.totals(value, (batch["tags"] != PAD).sum())
        self.log.append(float(total) / float(tokens))
        (value * self.rank.world_size / tokens.to(value.dtype)).backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model, rank).train_step(shard)
