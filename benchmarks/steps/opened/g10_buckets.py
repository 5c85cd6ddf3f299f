"""DPO with gradients reduced in flat buckets, because one all_reduce a tensor was slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Cfg:
    vocab: int = 11
    width: int = 6
    pairs: int = 8
    length: int = 6
    beta: float = 0.3
    bucket_elements: int = 200


cfg = Cfg()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.width)
        self.lift = nn.Linear(cfg.width, 2 * cfg.width)
        self.drop = nn.Linear(2 * cfg.width, cfg.width)
        self.norm = nn.LayerNorm(cfg.width)
        self.out = nn.Linear(cfg.width, cfg.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """The log-probability of each sequence, given its first token."""
        x = self.emb(ids[:, :-1])
        x = self.norm(x + self.drop(F.silu(self.lift(x.cumsum(1)))))
        return self.out(x).log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


def preferences(generator: torch.Generator) -> dict[str, Tensor]:
    shape = (cfg.pairs, cfg.length)
    return {
        "chosen": torch.randint(0, cfg.vocab, shape, generator=generator),
        "rejected": torch.randint(0, cfg.vocab, shape, generator=generator),
        "ref_margin": torch.randn(cfg.pairs, generator=generator),
    }


def dpo(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    both = model(torch.cat([b["chosen"], b["rejected"]]))
    chosen, rejected = both.chunk(2)
    return -F.logsigmoid(cfg.beta * (chosen - rejected - b["ref_margin"])).mean()


case = Case(model=Policy, batch=preferences, loss=dpo, layout="2x2")


def buckets(params: Iterable[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Groups of parameters with about ``limit`` elements, in backward order."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for p in params:
        bucket.append(p)
        filled += p.numel()
        if filled >= limit:
            yield bucket
            bucket, filled = [], 0


def reduce_bucket(bucket: list[nn.Parameter]) -> None:
    flat = torch.cat([p.grad.flatten() for p in bucket])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad.copy_(part.view_as(p))


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    dpo(model, shard).backward()
    in_backward_order = reversed([p for p in model.parameters() if p.requires_grad])
    for bucket in buckets(in_backward_order, cfg.bucket_elements):
        reduce_bucket(bucket)
