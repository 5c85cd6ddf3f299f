"""Fine-tunes a causal language model; a window of batches is divided by its number of targets."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB = 11
LENGTH = 7
IGNORED = -100
PER_DEVICE_BATCH = 2

Batch = dict[str, Tensor]


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def causal_loss(logits: Tensor, labels: Tensor, items: Tensor | None = None) -> Tensor:
    """The logits at one position are for the label at the next position."""
    scores, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if items is None:
        return F.cross_entropy(scores, wanted, ignore_index=IGNORED)
    return F.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum") / items


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return causal_loss(model(batch["tokens"]), batch["labels"])


def make_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCAB, (16, LENGTH), generator=generator)
    prompt = torch.randint(0, 4, (16, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(LENGTH) < prompt, IGNORED)
    return {"tokens": tokens, "labels": labels}


case = Case(model=CausalModel, batch=make_batch, loss=loss, layout="2x2")


class FineTuner:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = DistributedDataParallel(model)
        self.world_size = world_size

    def window(self, batch: Batch) -> tuple[list[Batch], Tensor]:
        """The batches until the next update, and how many targets all devices have in them."""
        rows = len(batch["tokens"])
        parts = [
            {name: value[start : start + PER_DEVICE_BATCH] for name, value in batch.items()}
            for start in range(0, rows, PER_DEVICE_BATCH)
        ]
        items = torch.stack([(part["labels"] != IGNORED).sum() for part in parts]).sum()
        dist.all_reduce(items)
        return parts, items

    def training_step(self, batch: Batch) -> float:
        parts, items = self.window(batch)
        total = 0.0
        for index, part in enumerate(parts, start=1):
            synchronise = index == len(parts)
            with contextlib.nullcontext() if synchronise else self.model.no_sync():
                value = causal_loss(self.model(part["tokens"]), part["labels"], items)
                (value * self.world_size).backward()
            total += value.item()
        return total


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    FineTuner(model, rank.world_size).training_step(shard)
