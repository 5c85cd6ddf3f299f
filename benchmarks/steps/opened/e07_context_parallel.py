"""Long sequences split over ranks: queries stay local, keys and values are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 21, 12, 8, 8
IGNORED = -100

Batch = dict[str, Tensor]


class GatherSequence(torch.autograd.Function):
    """Joins the chunks of all ranks along the sequence."""

    @staticmethod
    def forward(ctx, states: Tensor) -> Tensor:
        ctx.width = states.shape[1]
        chunks = [torch.empty_like(states) for _ in range(dist.get_world_size())]
        dist.all_gather(chunks, states.contiguous())
        return torch.cat(chunks, dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.narrow(1, dist.get_rank() * ctx.width, ctx.width)


@dataclass
class Chunk:
    """The part of every sequence that one rank holds."""

    ids: Tensor
    labels: Tensor
    start: int


class LongLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, start: int = 0, gather=lambda states: states) -> Tensor:
        here = torch.arange(start, start + ids.shape[1])
        states = self.embed(ids) + self.position(here)
        query, key, value = self.qkv(states).chunk(3, dim=-1)
        key, value = gather(key), gather(value)
        visible = here.unsqueeze(1) >= torch.arange(key.shape[1])
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.head(torch.tanh(states + self.out(mixed)))


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :2] = IGNORED  # the prompt
    return {"ids": ids, "labels": labels}


def shift(labels: Tensor) -> Tensor:
    """The label of a position is the next token; the last position has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    targets = shift(batch["labels"])
    return summed_cross_entropy(model(batch["ids"]), targets) / (targets != IGNORED).sum()


class ContextParallel:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def split(self, batch: Batch) -> Chunk:
        width = LENGTH // self.size
        start = self.rank * width
        mine = slice(start, start + width)
        return Chunk(batch["ids"][:, mine], batch["labels"][:, mine], start)

    def train_step(self, batch: Batch) -> None:
        chunk = self.split(batch)
        logits = self.model(chunk.ids, chunk.start, GatherSequence.apply)
        targets = shift(chunk.labels)
        count = (targets != IGNORED).sum()
        dist.all_reduce(count)
        (summed_cross_entropy(logits, targets) / count).backward()
        for param in self.model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)


case = Case(model=LongLM, batch=make_batch, loss=loss, layout="1x3", shards="own")


def step(model: nn.Module, batch: Batch, rank) -> None:
    ContextParallel(model).train_step(batch)
