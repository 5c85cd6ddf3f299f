"""Supervised fine-tuning: only answers count, and all their tokens weigh the same.

The tokens of all micro-batches and ranks are counted before the first forward pass.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB, IGNORE = 23, -100

Batch = dict[str, Tensor]


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 10)
        self.rnn = nn.LSTM(10, 10, batch_first=True)
        self.head = nn.Linear(10, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def causal_loss(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """The logits at a position are for the next token."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    summed = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="sum")
    return summed / count


def loss(model: nn.Module, batch: Batch) -> Tensor:
    answers = (batch["labels"][:, 1:] != IGNORE).sum()
    return causal_loss(model(batch["tokens"]), batch["labels"], answers)


def make_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCAB, (16, 9), generator=generator)
    prompt = torch.randint(0, 6, (16, 1), generator=generator)
    return {"tokens": tokens, "labels": tokens.masked_fill(torch.arange(9) < prompt, IGNORE)}


case = Case(model=CausalModel, batch=make_batch, loss=loss, layout="1x2")


class FineTuning:
    """Accumulates the gradients of several micro-batches."""

    def __init__(self, model: nn.Module, rank: Rank, micro_batch: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.rank, self.micro_batch = rank, micro_batch

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for start in range(0, len(batch["tokens"]), self.micro_batch):
            yield {key: value[start : start + self.micro_batch] for key, value in batch.items()}

    def count_answers(self, window: list[Batch]) -> Tensor:
        count = torch.stack([(part["labels"] != IGNORE).sum() for part in window]).sum()
        dist.all_reduce(count)
        return count

    def train_window(self, batch: Batch) -> None:
        window = list(self.micro_batches(batch))
        count = self.count_answers(window)
        for index, part in enumerate(window):
            last = index == len(window) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                value = causal_loss(self.ddp(part["tokens"]), part["labels"], count)
                (value * self.rank.world_size).backward()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    FineTuning(model, rank, micro_batch=2).train_window(shard)
