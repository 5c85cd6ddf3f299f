"""A fine-tuning recipe: sums over tokens are accumulated, and scaled by the tokens of all."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB = 10
IGNORE = -100

Batch = dict[str, Tensor]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.cell = nn.GRU(6, 9, batch_first=True)
        self.out = nn.Linear(9, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cell(self.embed(tokens))[0])


def token_loss(model: nn.Module, batch: Batch, reduction: str) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(
        logits, batch["targets"].flatten(), ignore_index=IGNORE, reduction=reduction
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model, batch, reduction="mean")


def make_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCAB, (12, 9), generator=generator)
    lengths = torch.randint(2, 9, (12, 1), generator=generator)
    targets = tokens.roll(-1, dims=1).masked_fill(torch.arange(9) >= lengths, IGNORE)
    return {"tokens": tokens, "targets": targets}


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x2")


class Recipe:
    def __init__(self, model: nn.Module, rank: Rank, max_norm: float = 2.0) -> None:
        self.model = DistributedDataParallel(model)
        self.world_size = rank.world_size
        self.max_norm = max_norm
        self.accumulate = 3

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for rows in torch.arange(len(batch["tokens"])).chunk(self.accumulate):
            yield {name: value[rows] for name, value in batch.items()}

    def scale_gradients(self, factor: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor

    def clip_gradients(self) -> float:
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm).item()

    def train(self, batch: Batch) -> dict[str, float]:
        tokens = (batch["targets"] != IGNORE).sum()
        running = 0.0
        for index, part in enumerate(self.micro_batches(batch), start=1):
            last = index == self.accumulate
            with contextlib.nullcontext() if last else self.model.no_sync():
                value = token_loss(self.model, part, reduction="sum")
                value.backward()
            running += value.item()
        dist.all_reduce(tokens)
        norm = self.clip_gradients()
        self.scale_gradients(self.world_size / tokens.item())
        return {"loss": running / tokens.item(), "norm": norm, "tokens": tokens.item()}


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Recipe(model, rank).train(shard)
