"""Tensor-parallel self-attention: every node holds one replica, its ranks share the heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, HEADS, LENGTH, CLASSES = 16, 4, 6, 5
HEAD = WIDTH // HEADS


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def attention(projected: Tensor, heads: int) -> Tensor:
    """Causal attention of fused projections: (batch, length, 3 * heads * HEAD)."""
    batch, length, _ = projected.shape
    query, key, value = projected.view(batch, length, 3, heads, HEAD).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, heads * HEAD)


class AttentionClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inputs(features)
        hidden = hidden + self.out(attention(self.qkv(self.norm(hidden)), HEADS))
        return self.head(hidden.mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(12, LENGTH, 7, generator=generator),
        "labels": torch.randint(CLASSES, (12,), generator=generator),
    }


class TensorParallelTrainer:
    def __init__(self, model: AttentionClassifier, rank) -> None:
        self.model = model
        self.degree = rank.local_world_size
        self.part = rank.local_rank
        self.replicas, self.replica = rank.nodes, rank.node
        for node in range(rank.nodes):
            members = range(node * self.degree, (node + 1) * self.degree)
            group = dist.new_group(list(members))
            if node == rank.node:
                self.group = group

    def column_shard(self, weight: Tensor) -> Tensor:
        """The rows of a column-parallel weight that belong to this rank."""
        return weight.chunk(self.degree, dim=0)[self.part]

    def row_shard(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.degree, dim=1)[self.part]

    def forward(self, features: Tensor) -> Tensor:
        model = self.model
        hidden = model.inputs(features)
        normed = CopyToTensorParallel.apply(model.norm(hidden), self.group)
        qkv = self.column_shard(model.qkv.weight)
        mixed = attention(F.linear(normed, qkv), HEADS // self.degree)
        partial = F.linear(mixed, self.row_shard(model.out.weight))
        hidden = hidden + ReduceFromTensorParallel.apply(partial, self.group)
        return model.head(hidden.mean(dim=1))

    def train_step(self, batch: dict[str, Tensor]) -> None:
        mine = {name: value.chunk(self.replicas)[self.replica] for name, value in batch.items()}
        F.cross_entropy(self.forward(mine["features"]), mine["labels"]).backward()
        sharded = {id(self.model.qkv.weight), id(self.model.out.weight)}
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            copies = 1 if id(parameter) in sharded else self.degree
            parameter.grad /= self.replicas * copies


case = Case(model=AttentionClassifier, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model: AttentionClassifier, shard: dict[str, Tensor], rank) -> None:
    TensorParallelTrainer(model, rank).train_step(shard)
