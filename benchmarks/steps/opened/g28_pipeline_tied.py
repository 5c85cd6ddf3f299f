"""A two-stage pipeline by hand: activations go forward, their gradients come back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

VOCAB, DIM, SEQ, ROWS, MICRO = 12, 6, 5, 8, 4
FIRST, LAST = 0, 1


class TiedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.h = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids)

    def blocks(self, x: Tensor, which: range) -> Tensor:
        for i in which:
            x = x + torch.tanh(self.h[i](x.cumsum(1)))
        return x

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.wte.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.blocks(self.embed(ids), range(4)))


def xent(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    return {"ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}


case = Case(
    model=TiedLM,
    batch=make_batch,
    loss=lambda model, b: xent(model(b["ids"]), b["labels"]),
    layout="1x2",
    shards="own",
)


class Stage:
    def __init__(self, model: TiedLM, me: int) -> None:
        self.model, self.me = model, me
        self.mine = range(0, 2) if me == FIRST else range(2, 4)

    def first(self, micros: list[Tensor]) -> None:
        sent = []
        for ids in micros:
            x = self.model.blocks(self.model.embed(ids), self.mine)
            dist.send(x.detach().contiguous(), dst=LAST)
            sent.append(x)
        for x in sent:
            grad = torch.empty_like(x)
            dist.recv(grad, src=LAST)
            x.backward(grad)

    def last(self, micros: list[Tensor], dtype: torch.dtype) -> None:
        received = []
        for labels in micros:
            x = torch.empty(*labels.shape, DIM, dtype=dtype)
            dist.recv(x, src=FIRST)
            received.append(x.requires_grad_())
        for x, labels in zip(received, micros):
            value = xent(self.model.logits(self.model.blocks(x, self.mine)), labels)
            (value / len(micros)).backward()
            dist.send(x.grad, dst=FIRST)

    def share_gradients(self) -> None:
        """Every rank gets the gradients of both stages, for its checkpoint of the optimizer."""
        for i, block in enumerate(self.model.h):
            self._from(FIRST if i < 2 else LAST, block.parameters())
        self._from(FIRST, self.model.wte.parameters())

    def _from(self, src: int, params) -> None:
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.broadcast(p.grad, src=src)


def step(model: TiedLM, batch: dict[str, Tensor], rank: Rank) -> None:
    stage = Stage(model, dist.get_rank())
    if stage.me == FIRST:
        stage.first(list(batch["ids"].chunk(MICRO)))
    else:
        stage.last(list(batch["labels"].chunk(MICRO)), model.wte.weight.dtype)
    stage.share_gradients()
