"""Segmentation of street scenes with rare classes, which have a larger weight.

Pixels without a label are left out. The loss of a rank is divided by the total of all ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
UNLABELLED = 255
CLASS_WEIGHTS = (0.4, 1.0, 2.5, 4.0)
AUXILIARY = 0.4


class Segmenter(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.context = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.classify = nn.Conv2d(width, len(CLASS_WEIGHTS), 1)
        self.auxiliary = nn.Conv2d(width, len(CLASS_WEIGHTS), 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        low = F.elu(self.down(images))
        high = F.elu(self.context(low)) + low
        outputs = (self.classify(high), self.auxiliary(low))
        main, auxiliary = (F.interpolate(x, scale_factor=2, mode="bilinear") for x in outputs)
        return main, auxiliary


def weighted_loss(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(
        logits,
        labels,
        weight=logits.new_tensor(CLASS_WEIGHTS),
        ignore_index=UNLABELLED,
        reduction=reduction,
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    main, auxiliary = model(batch["images"])
    parts = (weighted_loss(logits, batch["labels"], "mean") for logits in (main, auxiliary))
    return next(parts) + AUXILIARY * next(parts)


def make_batch(generator: torch.Generator) -> Batch:
    labels = torch.randint(len(CLASS_WEIGHTS), (8, 6, 6), generator=generator)
    hidden = torch.rand(8, 6, 6, generator=generator) < 0.2
    return {
        "images": torch.rand(8, 3, 6, 6, generator=generator),
        "labels": labels.masked_fill(hidden, UNLABELLED),
    }


case = Case(model=Segmenter, batch=make_batch, loss=loss, layout="1x2")


class SegmentationTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.world_size = rank.world_size

    def share(self, labels: Tensor, like: Tensor) -> Tensor:
        """What one unit of summed loss counts, so that all ranks together give a mean."""
        labelled = labels[labels != UNLABELLED]
        total = like.new_tensor(labelled.numel())
        dist.all_reduce(total)
        return self.world_size / total

    def train_on(self, batch: Batch) -> None:
        main, auxiliary = self.ddp(batch["images"])
        summed = weighted_loss(main, batch["labels"], "sum")
        summed = summed + AUXILIARY * weighted_loss(auxiliary, batch["labels"], "sum")
        (summed * self.share(batch["labels"], like=summed)).backward()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    SegmentationTrainer(model, rank).train_on(shard)
