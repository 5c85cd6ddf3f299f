"""ALBERT-like pre-training: one layer used at every depth, with activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 22, 6, 16, 8
MASK, IGNORED = 0, -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class AlbertConfig:
    depth: int = 3
    width: int = WIDTH


class SharedLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.qkv(states).chunk(3, dim=-1)
        states = states + F.scaled_dot_product_attention(query, key, value)
        return self.norm(states + self.down(F.gelu(self.up(states))))


class Albert(nn.Module):
    def __init__(self, config: AlbertConfig | None = None) -> None:
        super().__init__()
        self.config = config or AlbertConfig()
        self.embed = nn.Embedding(VOCAB, self.config.width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, self.config.width))
        self.layer = SharedLayer(self.config.width)
        self.head = nn.Linear(self.config.width, VOCAB)
        self.run_layer = None

    def enable_checkpointing(self) -> None:
        self.run_layer = partial(checkpoint, self.layer, use_reentrant=True)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids) + self.position
        for _ in range(self.config.depth):
            states = (self.run_layer or self.layer)(states)
        return self.head(states)


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(1, VOCAB, (EXAMPLES, LENGTH), generator=generator)
    masked = torch.rand(EXAMPLES, LENGTH, generator=generator) < 0.4
    masked[:, 0] = True
    return {"ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, IGNORED)}


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return summed_loss(model, batch) / (batch["labels"] != IGNORED).sum()


class OverlappedReducer:
    """Sums a gradient over the ranks as soon as the backward has finished it."""

    def __init__(self, model: nn.Module) -> None:
        self.handles = [
            param.register_post_accumulate_grad_hook(self.reduce)
            for param in model.parameters()
            if param.requires_grad
        ]

    @staticmethod
    def reduce(param: Tensor) -> None:
        dist.all_reduce(param.grad)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class MaskedLMTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.model.enable_checkpointing()
        self.reducer = OverlappedReducer(model)

    def train_step(self, batch: Batch) -> None:
        count = (batch["labels"] != IGNORED).sum()
        dist.all_reduce(count)
        (summed_loss(self.model, batch) / count).backward()
        self.reducer.remove()


case = Case(model=Albert, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    MaskedLMTrainer(model).train_step(shard)
