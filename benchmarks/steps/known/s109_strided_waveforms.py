"""Classifies waveforms. The process deals the recordings to itself in strides, without a loader."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

KINDS = 4


class WaveNet(nn.Module):
    """Two strided convolutions, pooled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Conv1d(2, 6, kernel_size=5, stride=2)
        self.upper = nn.Conv1d(6, 8, kernel_size=3, stride=2)
        self.out = nn.Linear(8, KINDS)

    def forward(self, waves: Tensor) -> Tensor:
        hidden = F.gelu(self.lower(waves))
        hidden = F.gelu(self.upper(hidden))
        return self.out(hidden.mean(dim=-1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["waves"]), batch["kind"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "waves": torch.randn(20, 2, 24, generator=generator),
        "kind": torch.randint(0, KINDS, (20,), generator=generator),
    }


case = Case(model=WaveNet, batch=make_batch, loss=loss, layout="2x2", shards="own")


def indices_of(rank: Rank, recordings: int) -> Tensor:
    """Every world_size-th recording, so that neighbours in a session end up on different ranks."""
    assert recordings % rank.world_size == 0, "drop the last recordings first"
    return torch.arange(rank.local_rank, recordings, rank.world_size)


def pieces_of(
    batch: dict[str, Tensor], indices: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for chosen in indices.split(size):
        yield batch["waves"][chosen], batch["kind"][chosen]


def reduce_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    recordings = len(batch["kind"])
    model.train()
    model.zero_grad()
    for waves, kind in pieces_of(batch, indices_of(rank, recordings), size=2):
        summed = F.cross_entropy(model(waves), kind, reduction="sum")
        (summed / recordings).backward()
    reduce_gradients(model)
