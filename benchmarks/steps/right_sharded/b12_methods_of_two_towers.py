"""Two towers without a forward: FSDP is told of the methods that stand in for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


def tower(size: int, width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, out))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_tower = tower(18, 13, 8)
        self.text_tower = tower(10, 9, 8)
        self.projection = nn.Parameter(torch.eye(8) + 0.1 * torch.randn(8, 8))
        self.bias = nn.Parameter(torch.full((1,), -0.5))

    def encode_image(self, images: Tensor) -> Tensor:
        return F.normalize(self.image_tower(images.flatten(1)) @ self.projection, dim=-1)

    def encode_text(self, texts: Tensor) -> Tensor:
        return F.normalize(self.text_tower(texts), dim=-1)

    def match(self, images: Tensor, texts: Tensor) -> Tensor:
        """The logit with which an image and a text belong together."""
        images, texts = self.encode_image(images), self.encode_text(texts)
        return 4 * (images * texts).sum(-1) + self.bias


METHODS = ("encode_image", "encode_text", "match")


def shard_towers(model: TwoTowers) -> TwoTowers:
    for part in (model.image_tower, model.text_tower):
        fully_shard(part, reshard_after_forward=True)
    # The root unit holds the projection and the bias only.
    fully_shard(model, reshard_after_forward=False)
    for name in METHODS:
        register_fsdp_forward_method(model, name)
    return model


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(16, 3, 6, generator=generator),
        "texts": torch.randn(16, 10, generator=generator),
        "matches": torch.randint(2, (16,), generator=generator).double(),
    }


def loss(model: TwoTowers, batch: dict[str, Tensor]) -> Tensor:
    logits = model.match(batch["images"], batch["texts"])
    matching = F.binary_cross_entropy_with_logits(logits, batch["matches"])
    # Embeddings should not all point the same way: a term of one tower alone.
    spread = model.encode_image(batch["images"]).mean(-1).square().mean()
    return matching + 0.3 * spread


def step(model: TwoTowers, shard: dict[str, Tensor], rank: Rank) -> None:
    loss(shard_towers(model), shard).backward()


case = Case(model=TwoTowers, batch=pairs, loss=loss, layout="1x4")
