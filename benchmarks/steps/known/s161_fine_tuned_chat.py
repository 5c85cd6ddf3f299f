"""Fine-tunes a small causal model on chats and on plain text, in micro-batches.

Chats are trained on the answers only, plain text on everything. Every token that is trained on
counts the same, in whatever micro-batch and on whatever rank it is.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCABULARY, WIDTH, LENGTH, IGNORED = 23, 8, 9, -100
MICRO_BATCH = 2

Batch = dict[str, Tensor]


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return summed_loss(model, batch) / (batch["labels"][:, 1:] != IGNORED).sum()


def make_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (16, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(0, 16, 3):  # every third row is a chat
        asked = int(torch.randint(3, 6, (), generator=generator))
        labels[row, :asked] = IGNORED
    return {"tokens": tokens, "labels": labels}


case = Case(model=CausalModel, batch=make_batch, loss=loss, layout="1x4")


class Trainer:
    """Accumulates the micro-batches of a step, and lets DDP reduce with the last one."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = DistributedDataParallel(model)
        self.world_size = rank.world_size

    def trained_tokens(self, micro_batches: list[Batch]) -> Tensor:
        items = torch.stack([(each["labels"] != IGNORED).sum() for each in micro_batches]).sum()
        dist.all_reduce(items)
        return items

    def accumulate(self, micro_batches: list[Batch]) -> None:
        items = self.trained_tokens(micro_batches)
        for number, micro_batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with nullcontext() if last else self.model.no_sync():
                value = summed_loss(self.model, micro_batch) / items
                (value * self.world_size).backward()


def split(batch: Batch) -> Iterator[Batch]:
    for start in range(0, len(batch["tokens"]), MICRO_BATCH):
        yield {name: value[start : start + MICRO_BATCH] for name, value in batch.items()}


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    model.train()
    Trainer(model, rank).accumulate(list(split(shard)))
