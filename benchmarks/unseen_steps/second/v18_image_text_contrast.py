"""Contrastive pre-training of an image and a text tower; every rank scores its own rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


class GatherRows(Function):
    """The rows of all ranks, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        ctx.own = slice(dist.get_rank() * len(rows), (dist.get_rank() + 1) * len(rows))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad[ctx.own]


class TwoTowers(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.GELU(), nn.Flatten())
        self.image_projection = nn.Linear(54, width, bias=False)
        self.words = nn.Embedding(30, 12)
        self.text_projection = nn.Linear(12, width, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image_projection(self.image(images)), dim=-1)
        text = F.normalize(self.text_projection(self.words(captions).mean(dim=1)), dim=-1)
        return image, text, self.logit_scale.exp()


def captioned_images(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(12, 3, 8, 8, generator=generator),
        "captions": torch.randint(30, (12, 5), generator=generator),
    }


@dataclass
class ContrastiveLoss:
    gather: bool = False
    label_smoothing: float = 0.05
    _labels: Tensor | None = None

    def labels(self, logits: Tensor) -> Tensor:
        if self._labels is None or len(self._labels) != len(logits):
            self._labels = torch.arange(len(logits), device=logits.device)
        return self._labels

    def __call__(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        all_images = GatherRows.apply(image) if self.gather else image
        all_texts = GatherRows.apply(text) if self.gather else text
        per_image, per_text = scale * image @ all_texts.T, scale * text @ all_images.T
        smoothing = self.label_smoothing
        return 0.5 * (
            F.cross_entropy(per_image, self.labels(per_image), label_smoothing=smoothing)
            + F.cross_entropy(per_text, self.labels(per_text), label_smoothing=smoothing)
        )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return ContrastiveLoss()(*model(batch["images"], batch["captions"]))


class ContrastiveTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.criterion = ContrastiveLoss(gather=True)

    def train_step(self, batch: Batch) -> None:
        outputs = self.ddp(batch["images"], batch["captions"])
        self.criterion(*outputs).backward()


case = Case(model=TwoTowers, batch=captioned_images, loss=loss, layout="1x3")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ContrastiveTrainer(model).train_step(shard)
