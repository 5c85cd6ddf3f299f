"""A process reward model with ring attention: key and value blocks pass from rank to rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, LENGTH, EXAMPLES, HEADS, WIDTH = 5, 12, 8, 2, 8

Batch = dict[str, Tensor]


class RingShift(torch.autograd.Function):
    """Hands a block to the next rank; its gradient goes back to the rank before."""

    @staticmethod
    def pass_on(block: Tensor, distance: int) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        block = block.contiguous()
        result = torch.empty_like(block)
        work = dist.isend(block, dst=(rank + distance) % size)
        dist.recv(result, src=(rank - distance) % size)
        work.wait()
        return result

    @staticmethod
    def forward(ctx, block: Tensor) -> Tensor:
        return RingShift.pass_on(block, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return RingShift.pass_on(grad, -1)


class RewardModel(nn.Module):
    """Scores every step of a solution; sees only what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def project(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states = torch.tanh(self.embed(steps))
        heads = self.qkv(states).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        return states, query, key, value

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        return self.score(torch.tanh(states + mixed.transpose(1, 2).flatten(2))).squeeze(-1)

    def forward(self, steps: Tensor) -> Tensor:
        states, query, key, value = self.project(steps)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.finish(states, mixed)


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "steps": torch.randn(EXAMPLES, LENGTH, FEATURES, generator=generator),
        "correct": torch.randint(2, (EXAMPLES, LENGTH), generator=generator).double(),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["steps"]), batch["correct"])


class RingAttention:
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def visible(self, source: int, width: int) -> Tensor:
        """Which keys of the block that began on `source` each of our queries may see."""
        queries = self.rank * width + torch.arange(width)
        keys = source * width + torch.arange(width)
        return queries.unsqueeze(1) >= keys.unsqueeze(0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        width, block = query.shape[-2], torch.stack([key, value])
        scores, values = [], []
        for hop in range(self.size):
            source = self.rank - hop
            key, value = block
            score = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            scores.append(score.masked_fill(~self.visible(source, width), float("-inf")))
            values.append(value)
            if hop + 1 < self.size:
                block = RingShift.apply(block)
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        return weights @ torch.cat(values, dim=-2)


class LongContextTrainer:
    def __init__(self, model: RewardModel) -> None:
        self.model, self.attention = model, RingAttention()

    def my_part(self, leaf: Tensor) -> Tensor:
        return leaf.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]

    def train_step(self, batch: Batch) -> None:
        steps, correct = self.my_part(batch["steps"]), self.my_part(batch["correct"])
        states, query, key, value = self.model.project(steps)
        logits = self.model.finish(states, self.attention(query, key, value))
        F.binary_cross_entropy_with_logits(logits, correct).backward()
        for param in self.model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


case = Case(model=RewardModel, batch=make_batch, loss=loss, layout="1x3", shards="own")


def step(model: nn.Module, batch: Batch, rank) -> None:
    LongContextTrainer(model).train_step(batch)
