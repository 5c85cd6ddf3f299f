"""Gradients are partitioned over the ranks: each keeps the part that its optimizer updates.

After every micro-batch the gradients are reduced and scattered, and freed at once.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.classify = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.mix(self.tokens(tokens))
        return self.classify(self.norm(hidden.mean(1)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["topic"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(0, 17, (24, 6), generator=generator),
        "topic": torch.randint(0, 5, (24,), generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x3")


class PartitionedGradients:
    """The flat gradient, padded so that it can be cut into equal partitions."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int) -> None:
        self.parameters, self.world_size = parameters, world_size
        self.size = sum(p.numel() for p in parameters)
        self.partition = -(-self.size // world_size)
        self.owned = parameters[0].new_zeros(self.partition)

    def flatten(self) -> Tensor:
        flat = self.owned.new_zeros(self.partition * self.world_size)
        torch.cat([p.grad.flatten() for p in self.parameters], out=flat[: self.size])
        return flat

    def reduce(self) -> None:
        received = torch.empty_like(self.owned)
        dist.reduce_scatter_tensor(received, self.flatten())
        self.owned.copy_(received.div_(self.world_size))
        for p in self.parameters:
            p.grad = None

    def gather(self) -> None:
        flat = self.owned.new_empty(self.partition * self.world_size)
        dist.all_gather_into_tensor(flat, self.owned)
        sizes = [p.numel() for p in self.parameters]
        for p, grad in zip(self.parameters, flat[: self.size].split(sizes), strict=True):
            p.grad = grad.view_as(p).clone()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank, accumulation: int = 4) -> None:
    gradients = PartitionedGradients(list(model.parameters()), rank.world_size)
    topics = shard["topic"].chunk(accumulation)
    for tokens, topic in zip(shard["tokens"].chunk(accumulation), topics, strict=True):
        value = loss(model, {"tokens": tokens, "topic": topic})
        (value / accumulation).backward()
        gradients.reduce()
    gradients.gather()
