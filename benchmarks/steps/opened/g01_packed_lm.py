"""Packed pretraining: short documents are packed into one row, the loss crosses no boundary.

Written after an incident in which the logged loss was right and the learning rate seemed off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class PackCfg:
    vocab: int = 23
    rows: int = 8
    length: int = 12
    width: int = 10
    ignore: int = -100


CFG = PackCfg()


class TinyLM(nn.Module):
    def __init__(self, cfg: PackCfg) -> None:
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab, cfg.width)
        self.wpe = nn.Embedding(cfg.length, cfg.width)
        self.mix = nn.Linear(cfg.width, cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        same = segments[:, :, None] == segments[:, None, :]
        allowed = same & torch.ones_like(same).tril()
        h = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        weights = (h @ h.transpose(1, 2)).masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(torch.tanh(self.mix(weights @ h)) + h)


def pack(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, CFG.vocab, (CFG.rows, CFG.length), generator=generator)
    cuts = torch.rand(CFG.rows, CFG.length, generator=generator) < 0.25
    segments = cuts.cumsum(1)
    labels = ids.clone()
    # The first token of a document is predicted by nothing.
    labels[cuts] = CFG.ignore
    # The tail of the last rows is padding.
    keep = torch.randint(5, CFG.length, (CFG.rows, 1), generator=generator)
    labels[torch.arange(CFG.length) >= keep] = CFG.ignore
    return {"ids": ids, "segments": segments, "labels": labels}


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"], batch["segments"])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(
        logits.reshape(-1, CFG.vocab), labels.reshape(-1), ignore_index=CFG.ignore, reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed_loss(model, batch) / (batch["labels"][:, 1:] != CFG.ignore).sum()


case = Case(model=lambda: TinyLM(CFG), batch=pack, loss=loss, layout="1x2")


def count_tokens(labels: Tensor) -> Tensor:
    return (labels != CFG.ignore).sum()


def global_tokens(batch: dict[str, Tensor]) -> Tensor:
    n = count_tokens(batch["labels"])
    dist.all_reduce(n)
    return n


def sync_(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    denominator = global_tokens(shard)
    (summed_loss(model, shard) / denominator).backward()
    sync_(model)
