"""A causal language model whose sequences are split over the ranks (context parallelism)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, LENGTH, SEQUENCES = 13, 8, 12, 8
IGNORE = -100


class _GatherSequence(torch.autograd.Function):
    """Concatenates the chunks of all ranks along the sequence."""

    @staticmethod
    def forward(ctx, chunk):
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(chunks, chunk.contiguous())
        return torch.cat(chunks, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, gather=None) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if gather is not None:
            key, value = gather(key), gather(value)
        seen = positions.unsqueeze(1) >= torch.arange(key.shape[1]).unsqueeze(0)
        scores = (query @ key.transpose(1, 2)) / WIDTH**0.5
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor | None = None, gather=None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1])
        x = self.tokens(ids) + self.positions(positions)
        return self.head(x + self.attention(x, positions, gather))


def next_tokens(ids: Tensor) -> Tensor:
    """Labels: the token that follows, and nothing for the last position."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORE)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = next_tokens(batch["ids"])
    return summed_loss(model(batch["ids"]), labels) / (labels != IGNORE).sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)}


class ContextParallelTrainer:
    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def chunk(self, sequence: Tensor) -> Tensor:
        return sequence.chunk(self.size, dim=-1)[self.rank].contiguous()

    def train_step(self, batch: dict[str, Tensor]) -> None:
        ids = self.chunk(batch["ids"])
        labels = next_tokens(ids)
        positions = self.chunk(torch.arange(batch["ids"].shape[1]))
        count = (labels != IGNORE).sum()
        dist.all_reduce(count)
        logits = self.model(ids, positions, _GatherSequence.apply)
        (summed_loss(logits, labels) / count).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="1x2", shards="own")


def step(model, shard, rank):
    ContextParallelTrainer(model).train_step(shard)
