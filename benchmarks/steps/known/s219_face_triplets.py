"""Metric learning with triplets of faces. Gradients are exchanged while the backward pass runs.

Triplets are trained on in pieces, and exchanged once, in the backward pass of the last piece.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

MARGIN = 1.0


@dataclass
class Triplets:
    anchor: Tensor
    same: Tensor
    other: Tensor

    def split(self, pieces: int) -> list["Triplets"]:
        parts = (faces.chunk(pieces) for faces in (self.anchor, self.same, self.other))
        return [Triplets(*piece) for piece in zip(*parts, strict=True)]


class Faces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(1, 5, 3, stride=2)
        self.embed = nn.Linear(5 * 9, 6)

    def forward(self, faces: Tensor) -> Tensor:
        return self.embed(torch.tanh(self.convolve(faces)).flatten(1))


def loss(model: nn.Module, batch: Triplets) -> Tensor:
    anchor, same, other = model(batch.anchor), model(batch.same), model(batch.other)
    near, far = (anchor - same).square().sum(1), (anchor - other).square().sum(1)
    return F.softplus(MARGIN + near - far).mean()


def make_batch(generator: torch.Generator) -> Triplets:
    anchor = torch.rand(12, 1, 7, 7, generator=generator)
    return Triplets(
        anchor=anchor,
        same=anchor + 0.2 * torch.randn(anchor.shape, generator=generator),
        other=torch.rand(anchor.shape, generator=generator),
    )


case = Case(model=Faces, batch=make_batch, loss=loss, layout="1x2")


class OverlappedTrainer:
    """Averages a gradient over the ranks as soon as it is complete."""

    def __init__(self, model: nn.Module, world_size: int, pieces: int = 3) -> None:
        self.model = model
        self.world_size = world_size
        self.pieces = pieces
        self.passes = 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        if self.passes % self.pieces == 0:
            parameter.grad /= self.world_size
            dist.all_reduce(parameter.grad)

    def train_on(self, batch: Triplets) -> None:
        for piece in batch.split(self.pieces):
            (loss(self.model, piece) / self.pieces).backward()
            self.passes += 1


def step(model: nn.Module, shard: Triplets, rank: Rank) -> None:
    trainer = OverlappedTrainer(model, rank.world_size)
    trainer.train_on(shard)
