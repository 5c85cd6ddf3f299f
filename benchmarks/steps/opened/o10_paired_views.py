"""Satellite images and their captions: a symmetric contrastive loss over the pairs of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PAIRS, BANDS, WORDS, WIDTH = 12, 7, 30, 5


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(BANDS, 9), nn.ReLU(), nn.Linear(9, WIDTH))
        self.caption = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(batch["image"]), dim=1)
        caption = F.normalize(self.caption(batch["caption"]), dim=1)
        return image, caption, self.log_scale.exp()


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "image": torch.randn(PAIRS, BANDS, generator=generator),
        "caption": torch.randint(0, WORDS, (PAIRS, 4), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    image, caption, scale = model(batch)
    logits = scale * image @ caption.T
    truth = torch.arange(len(logits))
    return 0.5 * (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth))


class GlobalContrast(nn.Module):
    """Own images against all captions, own captions against all images."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.cached: dict[int, Tensor] = {}

    def truth(self, count: int) -> Tensor:
        """The column of each own row's partner."""
        if count not in self.cached:
            self.cached[count] = torch.arange(count)
        return self.cached[count]

    def forward(self, image: Tensor, caption: Tensor, scale: Tensor) -> Tensor:
        all_images = torch.cat(all_gather(image))
        all_captions = torch.cat(all_gather(caption))
        truth = self.truth(len(image))
        by_image = F.cross_entropy(scale * image @ all_captions.T, truth)
        by_caption = F.cross_entropy(scale * caption @ all_images.T, truth)
        return 0.5 * (by_image + by_caption)


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    ddp = DistributedDataParallel(model)
    contrast = GlobalContrast()
    contrast(*ddp(shard)).backward()


case = Case(model=TwoTowers, batch=pairs, loss=loss, layout="1x2")
