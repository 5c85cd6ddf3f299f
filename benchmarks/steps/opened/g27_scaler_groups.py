"""Mixed-precision style loss scaling by hand, for an optimizer with and without weight decay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass
class OptimConfig:
    lr: float = 1e-3
    weight_decay: float = 0.1
    init_scale: float = 2.0**10


class Encoder(nn.Module):
    """A masked-language-model encoder with one head of attention."""

    def __init__(self, vocab: int = 14, dim: int = 8) -> None:
        super().__init__()
        self.vocab = vocab
        self.tok = nn.Embedding(vocab, dim)
        self.ln = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        return self.out(x + F.scaled_dot_product_attention(q, k, v))


def masked_text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(1, 14, (8, 6), generator=generator)
    hidden = torch.zeros(8, 6, dtype=torch.bool)
    hidden[:, [1, 4]] = True  # as many in every row
    return {"ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(~hidden, -100)}


def mlm(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten())


case = Case(model=Encoder, batch=masked_text, loss=mlm, layout="2x2")


def param_groups(model: nn.Module, cfg: OptimConfig) -> list[dict]:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": decay, "weight_decay": cfg.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


class LossScaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def backward(self, value: Tensor) -> None:
        (value * self.scale).backward()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        inverse = 1.0 / self.scale
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(inverse)


def average_(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    cfg = OptimConfig()
    optimizer = torch.optim.AdamW(param_groups(model, cfg), lr=cfg.lr)
    scaler = LossScaler(cfg.init_scale)
    scaler.backward(mlm(model, shard))
    average_(optimizer)
    scaler.unscale_(optimizer)
