"""Depth from one image: the composable `replicate`, micro-batches, and one reduction at the end."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate

from ddp_equivalence import Case

SIDE, MICRO_BATCH = 6, 2


class DepthNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ELU())
        self.context = nn.Conv2d(5, 5, 3, padding=2, dilation=2)
        self.decoder = nn.Conv2d(5, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder(images)
        return self.decoder(x + torch.tanh(self.context(x))).squeeze(1)


def scale_invariant(predicted: Tensor, logs: Tensor, weight: float = 0.5) -> Tensor:
    """Mean over the images of the error in log depth, of which a common factor counts less."""
    difference = (predicted - logs).flatten(1)
    per_image = difference.square().mean(dim=1) - weight * difference.mean(dim=1).square()
    return per_image.mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return scale_invariant(model(batch["images"]), batch["depth"].log())


def rooms(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(10, 3, SIDE, SIDE, generator=generator),
        "depth": 0.5 + 4 * torch.rand(10, SIDE, SIDE, generator=generator),
    }


@contextmanager
def synchronised(model: nn.Module, when: bool):
    model.set_requires_gradient_sync(when)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class DepthTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = replicate(model)
        self.seen = 0

    def loader(self, batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(batch["images"].split(MICRO_BATCH), batch["depth"].split(MICRO_BATCH)))

    def accumulate(self, batch: dict[str, Tensor]) -> None:
        micro_batches = self.loader(batch)
        for number, (images, depth) in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with synchronised(self.model, when=last):
                error = scale_invariant(self.model(images), depth.log())
                (error / len(micro_batches)).backward()
            self.seen += len(images)


def step(model, shard, rank):
    trainer = DepthTrainer(model)
    trainer.accumulate(shard)
    assert trainer.seen == len(shard["images"])


case = Case(model=DepthNet, batch=rooms, loss=loss, layout="1x2")
