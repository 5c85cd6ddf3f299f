"""Fine-tuning of a pretrained backbone whose batch normalizations keep their statistics."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class FinetuneConfig:
    keypoints: int = 3
    width: int = 6
    image: int = 8
    freeze_statistics: bool = True


CFG = FinetuneConfig()


class Backbone(nn.Sequential):
    def __init__(self, width):
        super().__init__(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
        )


class KeypointNet(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.cfg = cfg
        self.backbone = Backbone(cfg.width)
        self.head = nn.Linear(2 * cfg.width * (cfg.image // 4) ** 2, 2 * cfg.keypoints)

    def forward(self, images):
        features = self.backbone(images).flatten(1)
        return self.head(features).view(-1, self.cfg.keypoints, 2)


def freeze_batch_statistics(model):
    """Weights and biases of the normalizations stay trainable."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.momentum = 0.0


def load_pretrained():
    model = KeypointNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.2 * torch.randn(module.num_features))
            module.running_var.copy_(0.5 + torch.rand(module.num_features))
    if CFG.freeze_statistics:
        freeze_batch_statistics(model)
    return model


def keypoint_loss(model, batch):
    error = F.smooth_l1_loss(model(batch["images"]), batch["keypoints"], reduction="none")
    return (error.sum(dim=-1) * batch["visible"]).mean()


class FinetuneEngine:
    def __init__(self, model, cfg=CFG):
        self.cfg = cfg
        self.model = DistributedDataParallel(model, broadcast_buffers=False)
        self.epoch_losses = []

    def on_epoch_start(self):
        self.model.train()
        self.epoch_losses.clear()

    def run_batch(self, batch):
        loss = keypoint_loss(self.model, batch)
        loss.backward()
        self.epoch_losses.append(loss.item())

    def run_epoch(self, loader):
        self.on_epoch_start()
        for batch in loader:
            self.run_batch(batch)
        return sum(self.epoch_losses) / len(self.epoch_losses)


def make_batch(generator):
    shape = (12, CFG.keypoints)
    return {
        "images": torch.randn(12, 3, CFG.image, CFG.image, generator=generator),
        "keypoints": torch.randn(*shape, 2, generator=generator),
        "visible": (torch.rand(shape, generator=generator) < 0.8).to(torch.float64),
    }


case = Case(model=load_pretrained, batch=make_batch, loss=keypoint_loss, layout="1x3")


def step(model, shard, rank):
    FinetuneEngine(model).run_epoch([shard])
