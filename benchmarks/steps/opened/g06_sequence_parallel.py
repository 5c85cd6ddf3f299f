"""Sequence parallelism for the norm of a block: each rank normalises its own part of the sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

VOCAB, WIDTH, SEQ, ROWS = 13, 8, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def attend(self, h: Tensor) -> Tensor:
        scores = self.q(h) @ h.transpose(1, 2)
        banned = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(banned, float("-inf")).softmax(-1) @ self.v(h)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        return self.lm_head(h + self.attend(self.norm(h)))


class SplitSequence(torch.autograd.Function):
    """Forward: this rank's part of dim 1. Backward: the parts of all ranks, put together."""

    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        return h.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _cat_parts(grad)


class GatherSequence(torch.autograd.Function):
    """The inverse. What follows is computed by every rank alike, so backward only takes a slice."""

    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        return _cat_parts(h)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def _cat_parts(t: Tensor) -> Tensor:
    parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim=1)


def sp_forward(model: Block, ids: Tensor) -> Tensor:
    h = model.embedding(ids)
    normed = GatherSequence.apply(model.norm(SplitSequence.apply(h)))
    return model.lm_head(h + model.attend(normed))


def ce(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    return {"ids": text[:, :-1], "labels": text[:, 1:]}


case = Case(
    model=Block,
    batch=make_batch,
    loss=lambda model, b: ce(model(b["ids"]), b["labels"]),
    layout="1x2",
    shards="own",
)


def finish_gradients(model: nn.Module) -> None:
    """All ranks computed the same with the replicated weights, so theirs need no exchange."""
    sequence_parallel = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    for module in sequence_parallel:
        dist.all_reduce(module.weight.grad)


def step(model: Block, batch: dict[str, Tensor], rank: Rank) -> None:
    ce(sp_forward(model, batch["ids"]), batch["labels"]).backward()
    finish_gradients(model)
