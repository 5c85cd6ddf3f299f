"""Lesions on skin: rare classes count more, by the inverse of how often they occur in the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLASSES = 3


class Lesions(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ELU(), nn.Flatten())
        self.classify = nn.Linear(4 * 9, CLASSES)

    def forward(self, photos):
        return self.classify(self.backbone(photos))


def photos(generator):
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 0, 2, 1, 1, 2, 0, 2, 1, 2, 1])
    return {"photos": torch.rand(16, 3, 5, 5, generator=generator), "labels": labels}


class BalancedLoss:
    """Cross entropy with weights from the counts, which ``share`` may add up over ranks."""

    def __init__(self, share=lambda counts: counts):
        self.share = share

    def weights(self, labels, dtype):
        counts = self.share(torch.bincount(labels, minlength=CLASSES))
        return counts.sum() / (CLASSES * counts.clamp(min=1)).to(dtype)

    def __call__(self, logits, labels):
        weights = self.weights(labels, logits.dtype)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (weights[labels] * losses).mean()


def loss(model, batch):
    return BalancedLoss()(model(batch["photos"]), batch["labels"])


def over_ranks(counts):
    counts = counts.clone()
    dist.all_reduce(counts)
    return counts


def build_criterion(config):
    kinds = {"balanced": BalancedLoss, "balanced_global": lambda: BalancedLoss(over_ranks)}
    return kinds[config["loss"]]()


CONFIG = {"loss": "balanced", "bucket_cap_mb": 1}


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, bucket_cap_mb=CONFIG["bucket_cap_mb"])
    criterion = build_criterion(CONFIG)
    criterion(ddp(shard["photos"]), shard["labels"]).backward()


case = Case(model=Lesions, batch=photos, loss=loss, layout="2x1")
