"""Super-resolution. Gradients travel in buckets whose pieces start at aligned addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

ALIGN = 8
BUCKET = 200  # elements


class Upscaler(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.PReLU(5),
            nn.Conv2d(5, 5, 3, padding=1),
            nn.PReLU(),
            nn.Conv2d(5, 4, 3, padding=1),
            nn.PixelShuffle(2),
        )


def crops(generator: torch.Generator) -> dict[str, Tensor]:
    fine = torch.rand(8, 1, 12, 12, generator=generator)
    return {"coarse": F.avg_pool2d(fine, 2), "fine": fine}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Charbonnier: a smooth absolute error."""
    return ((model(batch["coarse"]) - batch["fine"]).square() + 1e-4).sqrt().mean()


def aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


@dataclass
class Bucket:
    members: list[nn.Parameter] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(aligned(p.numel()) for p in self.members)

    def pack(self) -> Tensor:
        flat = self.members[0].new_zeros(self.size)
        start = 0
        for p in self.members:
            flat[start : start + p.numel()] = p.grad.flatten()
            start += aligned(p.numel())
        return flat

    def unpack(self, flat: Tensor) -> None:
        pieces = flat.split([p.numel() for p in self.members] + [self.padding])
        for p, piece in zip(self.members, pieces):
            p.grad = piece.view_as(p).clone()

    @property
    def padding(self) -> int:
        return self.size - sum(p.numel() for p in self.members)


def buckets(model: nn.Module) -> list[Bucket]:
    """From the last layer to the first, in the order in which backward finishes them."""
    made = [Bucket()]
    for p in reversed(list(model.parameters())):
        if made[-1].members and made[-1].size + aligned(p.numel()) > BUCKET:
            made.append(Bucket())
        made[-1].members.append(p)
    return made


def step(model, shard, rank):
    loss(model, shard).backward()
    for bucket in buckets(model):
        flat = bucket.pack()
        dist.all_reduce(flat)
        bucket.unpack(flat / rank.world_size)


case = Case(model=Upscaler, batch=crops, loss=loss)
