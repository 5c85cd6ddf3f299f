"""A bag-of-words language model that exchanges only the rows of its embedding that were used."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, CONTEXT = 30, 8, 4


class ContinuousBagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB)

    def forward(self, context: Tensor) -> Tensor:
        mean = self.embedding(context).mean(dim=1)
        return self.output(torch.tanh(self.hidden(mean)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["context"]), batch["word"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    frequencies = 1.0 / torch.arange(1, VOCAB + 1)
    words = torch.multinomial(
        frequencies, 15 * (CONTEXT + 1), replacement=True, generator=generator
    ).view(15, CONTEXT + 1)
    return {"context": words[:, 1:].clone(), "word": words[:, 0].clone()}


class SparseRows:
    """The rows of a gradient that are not zero, as they travel between ranks."""

    def __init__(self, rows: Tensor, values: Tensor) -> None:
        self.rows, self.values = rows, values

    @classmethod
    def used_by(cls, gradient: Tensor, tokens: Tensor) -> SparseRows:
        rows = tokens.unique()
        return cls(rows, gradient[rows])

    def padded(self, size: int) -> SparseRows:
        missing = size - len(self.rows)
        return SparseRows(F.pad(self.rows, (0, missing)), F.pad(self.values, (0, 0, 0, missing)))

    def gather(self, world_size: int) -> SparseRows:
        largest = torch.tensor(len(self.rows))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        local = self.padded(int(largest))
        rows = [torch.empty_like(local.rows) for _ in range(world_size)]
        values = [torch.empty_like(local.values) for _ in range(world_size)]
        dist.all_gather(rows, local.rows)
        dist.all_gather(values, local.values)
        return SparseRows(torch.cat(rows), torch.cat(values))

    def to_dense(self, count: int) -> Tensor:
        dense = self.values.new_zeros(count, self.values.shape[1])
        dense[self.rows] += self.values
        return dense


class SparseAwareReducer:
    """Averages gradients; an embedding sends its used rows, everything else is dense."""

    def __init__(self, model: ContinuousBagOfWords, world_size: int) -> None:
        self.model, self.world_size = model, world_size

    def reduce_embedding(self, tokens: Tensor) -> None:
        weight = self.model.embedding.weight
        used = SparseRows.used_by(weight.grad, tokens)
        total = used.gather(self.world_size).to_dense(len(weight))
        weight.grad = total / self.world_size

    def reduce_dense(self) -> None:
        embedding = self.model.embedding.weight
        dense = [p for p in self.model.parameters() if p is not embedding]
        flat = torch.cat([p.grad.flatten() for p in dense])
        dist.all_reduce(flat)
        flat /= self.world_size
        for parameter, piece in zip(dense, flat.split([p.numel() for p in dense]), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))

    def __call__(self, batch: dict[str, Tensor]) -> None:
        self.reduce_embedding(batch["context"])
        self.reduce_dense()


case = Case(model=ContinuousBagOfWords, batch=make_batch, loss=loss, layout="1x3")


def step(model: ContinuousBagOfWords, shard: dict[str, Tensor], rank) -> None:
    reducer = SparseAwareReducer(model, rank.world_size)
    loss(model, shard).backward()
    reducer(shard)
