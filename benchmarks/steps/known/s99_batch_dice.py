"""Segmentation with a Dice loss whose overlaps are counted over the batch of all ranks."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES = 3
VOID = 255


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(2, 6, 3, padding=1, stride=2)
        self.decoder = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.skip = nn.Conv2d(2, 6, 1)
        self.classifier = nn.Conv2d(6, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        coarse = self.decoder(F.gelu(self.encoder(image)))
        return self.classifier(torch.tanh(coarse + self.skip(image)))


class DiceLoss(nn.Module):
    """One minus the mean overlap of the classes."""

    def __init__(self, distributed: bool = False, smooth: float = 1.0) -> None:
        super().__init__()
        self.distributed = distributed
        self.smooth = smooth

    def totals(self, overlap: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """The counts of all ranks."""
        dist.all_reduce(size)
        return differentiable.all_reduce(overlap), size

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        valid = (labels != VOID).unsqueeze(1)
        one_hot = F.one_hot(labels.clamp(max=CLASSES - 1), CLASSES).permute(0, 3, 1, 2) * valid
        probabilities = logits.softmax(dim=1) * valid
        overlap = (probabilities * one_hot).sum(dim=(0, 2, 3))
        size = (probabilities + one_hot).sum(dim=(0, 2, 3))
        if self.distributed:
            overlap, size = self.totals(overlap, size)
        return 1 - ((2 * overlap + self.smooth) / (size + self.smooth)).mean()


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    every = F.cross_entropy(logits, labels, ignore_index=VOID, reduction="none")
    return every.mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["image"])
    return DiceLoss()(logits, batch["label"]) + 0.5 * pixel_loss(logits, batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    label = torch.randint(0, CLASSES, (8, 4, 4), generator=generator)
    void = torch.rand(8, 4, 4, generator=generator) < 0.1
    return {
        "image": torch.randn(8, 2, 4, 4, generator=generator),
        "label": label.masked_fill(void, VOID),
    }


case = Case(model=Segmenter, batch=make_batch, loss=loss, layout="1x2")


class SegmentationTask:
    def __init__(self, model: nn.Module) -> None:
        self.model = DistributedDataParallel(model)
        self.dice = DiceLoss(distributed=True)

    def training_step(self, batch: dict[str, Tensor]) -> None:
        logits = self.model(batch["image"])
        value = self.dice(logits, batch["label"]) + 0.5 * pixel_loss(logits, batch["label"])
        value.backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    SegmentationTask(model).training_step(shard)
