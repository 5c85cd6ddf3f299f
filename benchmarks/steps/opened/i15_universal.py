"""A universal transformer (one block, used several times) with activation checkpointing.

Gradients are reduced as soon as they are there, by hooks on the parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

WORDS, WIDTH, TURNS, PAD = 23, 8, 3, 0


class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.turn = nn.Parameter(0.2 * torch.randn(TURNS, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)
        self.checkpointing = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for turn in range(TURNS):
            x = x + self.turn[turn]
            if self.checkpointing:
                x = checkpoint(self.block, x, use_reentrant=True)
            else:
                x = self.block(x)
        return self.out(x)


def copies(generator: torch.Generator) -> dict[str, Tensor]:
    """The words backwards, and nothing to predict behind the end of a sequence."""
    ids = torch.randint(1, WORDS, (8, 6), generator=generator)
    real = torch.arange(6) < torch.tensor([6, 5, 3, 6, 2, 4, 3, 2])[:, None]
    return {"ids": ids.where(real, PAD), "labels": ids.flip(1).where(real, PAD)}


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=PAD, reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed(model, batch) / (batch["labels"] != PAD).sum()


class ReduceEarly:
    """Sums every gradient over the ranks when backward has made it."""

    def __init__(self, model: nn.Module) -> None:
        self.handles = [
            p.register_post_accumulate_grad_hook(self.reduce)
            for p in model.parameters()
            if p.requires_grad
        ]

    @staticmethod
    def reduce(p: nn.Parameter) -> None:
        dist.all_reduce(p.grad)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    model.checkpointing = True
    hooks = ReduceEarly(model)
    tokens = (shard["labels"] != PAD).sum()
    dist.all_reduce(tokens)
    (summed(model, shard) / tokens).backward()
    hooks.remove()


case = Case(model=Universal, batch=copies, loss=loss)
