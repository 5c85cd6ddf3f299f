"""Acoustic model: ranks pad to a common length, and the loss is a mean over frames of all ranks."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

MOST_FRAMES, PHONES = 9, 6


class AcousticModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(5, 7, batch_first=True)
        self.phones = nn.Linear(7, PHONES)

    def forward(self, features: Tensor) -> Tensor:
        return self.phones(self.recurrent(features)[0])


def summed_loss(model: nn.Module, features: Tensor, phones: Tensor, lengths: Tensor) -> Tensor:
    valid = torch.arange(features.shape[1], device=lengths.device) < lengths[:, None]
    scores = model(features)
    return F.cross_entropy(scores[valid], phones[valid], reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed_loss(model, **batch) / batch["lengths"].sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(12, MOST_FRAMES, 5, generator=generator),
        "phones": torch.randint(0, PHONES, (12, MOST_FRAMES), generator=generator),
        "lengths": torch.randint(2, MOST_FRAMES + 1, (12,), generator=generator),
    }


case = Case(model=AcousticModel, batch=make_batch, loss=loss, layout="1x3")


class Extent(NamedTuple):
    """Of the batches of all ranks together."""

    frames: int
    longest: int

    @classmethod
    def of(cls, lengths: Tensor) -> "Extent":
        numbers = torch.stack([lengths.sum(), lengths.max()])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return cls(*numbers.tolist())


def trim(shard: dict[str, Tensor], longest: int) -> dict[str, Tensor]:
    return {
        "features": shard["features"][:, :longest],
        "phones": shard["phones"][:, :longest],
        "lengths": shard["lengths"],
    }


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    extent = Extent.of(shard["lengths"])
    model.zero_grad()
    value = summed_loss(model, **trim(shard, extent.longest)) / extent.frames
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
