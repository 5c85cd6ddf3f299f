"""Context parallelism for a causal convolutional LM: each rank holds a span of every sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass
class Args:
    vocab: int = 19
    dim: int = 8
    seq: int = 16
    halo: int = 2  # tokens a position sees to its left
    pad: int = -1


args = Args()


class ConvLM(nn.Module):
    def __init__(self, a: Args) -> None:
        super().__init__()
        self.tok = nn.Embedding(a.vocab, a.dim)
        self.taps = nn.ModuleList(nn.Linear(a.dim, a.dim, bias=False) for _ in range(a.halo + 1))
        self.out = nn.Linear(a.dim, a.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of all positions but the first ``halo``, which are context only."""
        h = self.tok(ids)
        n = ids.shape[1] - args.halo
        mixed = sum(tap(h[:, i : i + n]) for i, tap in enumerate(self.taps))
        return self.out(torch.relu(mixed) + h[:, args.halo :])


def corpus(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, args.vocab, (4, args.seq), generator=generator)
    return {"ids": ids}


def left_pad(ids: Tensor) -> Tensor:
    return F.pad(ids, (args.halo, 0), value=0)


def shift(ids: Tensor) -> Tensor:
    """Labels: the next token; none for the last position."""
    return F.pad(ids[:, 1:], (0, 1), value=args.pad)


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=args.pad, reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = shift(batch["ids"])
    return nll(model(left_pad(batch["ids"])), labels) / (labels != args.pad).sum()


case = Case(model=lambda: ConvLM(args), batch=corpus, loss=loss, layout="2x2", shards="own")


@dataclass
class Span:
    start: int
    stop: int


def my_span(length: int) -> Span:
    size = length // dist.get_world_size()
    return Span(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def local_view(ids: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """The tokens of the span with their left context, and the labels of the span."""
    tokens = left_pad(ids)[:, span.start : span.stop + args.halo]
    labels = shift(ids[:, span.start : span.stop])
    return tokens, labels


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    tokens, labels = local_view(batch["ids"], my_span(args.seq))
    count = (labels != args.pad).sum()
    dist.all_reduce(count)
    (nll(model(tokens), labels) / count).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
