"""Context parallelism: the ranks of a node share each sequence, and gather keys and values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 17, 12, 8
IGNORED = -100


class GatherSequence(torch.autograd.Function):
    """Joins the chunks of all ranks along dim 1; the gradient is summed and cut again."""

    @staticmethod
    def forward(ctx, chunk, group):
        ctx.group = group
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size(group))]
        dist.all_gather(chunks, chunk.contiguous(), group=group)
        return torch.cat(chunks, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        parts = total.chunk(dist.get_world_size(ctx.group), dim=1)
        return parts[dist.get_rank(ctx.group)].contiguous(), None


class OneLayerTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, start: int = 0, group=None) -> Tensor:
        mine = torch.arange(start, start + tokens.shape[1])
        hidden = self.tokens(tokens) + self.positions(mine)
        normed = self.norm(hidden)
        key_value = self.key_value(normed)
        if group is not None:
            key_value = GatherSequence.apply(key_value, group)
        key, value = key_value.chunk(2, dim=-1)
        visible = torch.arange(key.shape[1]) <= mine.unsqueeze(1)
        query = self.query(normed)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.head(hidden)


def next_tokens(tokens: Tensor) -> Tensor:
    """What each position has to predict; nothing at the last one."""
    end = torch.full_like(tokens[:, :1], IGNORED)
    return torch.cat([tokens[:, 1:], end], dim=1)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = next_tokens(batch["tokens"])
    return summed_loss(model(batch["tokens"]), targets) / (targets != IGNORED).sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCAB, (8, LENGTH), generator=generator)}


class ContextParallelTrainer:
    def __init__(self, model: OneLayerTransformer, rank) -> None:
        self.model, self.rank = model, rank
        size = rank.local_world_size
        for node in range(rank.nodes):
            group = dist.new_group([node * size + local for local in range(size)])
            if node == rank.node:
                self.group = group

    def local_part(self, sequences: Tensor) -> Tensor:
        return sequences.chunk(self.rank.local_world_size, dim=1)[self.rank.local_rank]

    def train_step(self, sequences: Tensor) -> None:
        tokens = self.local_part(sequences)
        targets = next_tokens(tokens)
        start = self.rank.local_rank * tokens.shape[1]
        logits = self.model(tokens, start=start, group=self.group)
        count = (targets != IGNORED).sum()
        dist.all_reduce(count)
        (summed_loss(logits, targets) / count).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


case = Case(
    model=OneLayerTransformer, batch=make_batch, loss=loss, layout="2x2", shards="own"
)


def step(model: OneLayerTransformer, shard: dict[str, Tensor], rank) -> None:
    trainer = ContextParallelTrainer(model, rank)
    trainer.train_step(shard["tokens"].chunk(rank.nodes)[rank.node])
