"""Causal language model trainer: the loss is a mean over all target tokens of an optimizer step."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB = 11
IGNORE = -100
Batch = dict[str, Tensor]


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        steps = torch.arange(1, tokens.shape[1] + 1).to(hidden).view(1, -1, 1)
        context = hidden.cumsum(dim=1) / steps
        return self.head(torch.tanh(self.mix(context)) + hidden)


def shifted_sum(logits: Tensor, labels: Tensor) -> Tensor:
    targets = labels[:, 1:].reshape(-1)
    rows = logits[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(rows, targets, ignore_index=IGNORE, reduction="sum")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    targets = batch["labels"][:, 1:]
    return shifted_sum(model(batch["tokens"]), batch["labels"]) / targets.ne(IGNORE).sum()


def make_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCAB, (16, 9), generator=generator)
    lengths = torch.randint(3, 10, (16, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(9) >= lengths, IGNORE)
    return {"tokens": tokens, "labels": labels}


case = Case(model=CausalModel, batch=make_batch, loss=loss, layout="1x2")


class Trainer:
    def __init__(self, model: nn.Module, rank: Rank, accumulation_steps: int = 4) -> None:
        self.model = DistributedDataParallel(model)
        self.world_size = rank.world_size
        self.accumulation_steps = accumulation_steps

    def batch_samples(self, shard: Batch) -> tuple[list[Batch], Tensor]:
        """The micro-batches of one optimizer step, and its number of items on all ranks."""
        chunks = {key: value.chunk(self.accumulation_steps) for key, value in shard.items()}
        rows = zip(*chunks.values(), strict=True)
        samples = [dict(zip(chunks, parts, strict=True)) for parts in rows]
        items = sum(sample["labels"].ne(IGNORE).sum() for sample in samples)
        dist.all_reduce(items)
        return samples, items

    def contexts(self, count: int) -> Iterator[contextlib.AbstractContextManager[None]]:
        for index in range(count):
            yield self.model.no_sync() if index + 1 < count else contextlib.nullcontext()

    def training_step(self, shard: Batch) -> None:
        samples, items = self.batch_samples(shard)
        for sample, context in zip(samples, self.contexts(len(samples)), strict=True):
            with context:
                total = shifted_sum(self.model(sample["tokens"]), sample["labels"])
                (total * self.world_size / items).backward()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    model.train()
    Trainer(model, rank).training_step(shard)
