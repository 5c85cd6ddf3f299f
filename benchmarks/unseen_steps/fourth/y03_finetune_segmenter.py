"""Fine-tune a segmentation network whose pretrained batch norms are frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

IMAGES, SIZE, CLASSES = 8, 12, 3


def conv_bn(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.GELU(),
    )


class Segmenter(nn.Module):
    """The encoder comes from a checkpoint: so do the statistics of its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv_bn(3, 8, 2), conv_bn(8, 8, 1))
        self.decoder = nn.ConvTranspose2d(8, CLASSES, 4, stride=2, padding=1)
        for module in self.encoder.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.5, 0.5)
                nn.init.uniform_(module.running_var, 0.5, 1.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


def freeze_norms(model: nn.Module) -> None:
    """Keep the running statistics, and use them; scale and shift remain trainable."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def build_model() -> nn.Module:
    model = Segmenter()
    freeze_norms(model)
    return model


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """One minus the overlap, of every image and class apart."""
    probability = logits.softmax(dim=1)
    truth = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).to(logits.dtype)
    overlap = (probability * truth).sum(dim=(2, 3))
    size = probability.sum(dim=(2, 3)) + truth.sum(dim=(2, 3))
    return (1 - (2 * overlap + 1) / (size + 1)).mean()


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + dice_loss(logits, labels)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    freeze_norms(model)
    return criterion(model(batch["images"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (IMAGES, SIZE, SIZE), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class Finetuner:
    def __init__(self, model: nn.Module) -> None:
        freeze_norms(model)
        self.ddp = DistributedDataParallel(model, broadcast_buffers=False)
        self.epoch = 0

    def begin_epoch(self) -> None:
        self.ddp.train()
        self.epoch += 1

    def train_on(self, loader: list[dict[str, Tensor]]) -> float:
        self.begin_epoch()
        total = 0.0
        for batch in loader:
            logits = self.ddp(batch["images"])
            batch_loss = criterion(logits, batch["labels"])
            batch_loss.backward()
            total += batch_loss.item()
        return total / len(loader)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Finetuner(model).train_on([shard])
