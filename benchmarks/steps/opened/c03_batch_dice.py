"""Cell segmentation with "batch Dice": overlap is pooled over all pixels of the step, per class."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

CLASSES = 3
SMOOTH = 1.0


class UNetish(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.out = nn.Conv2d(width + 1, CLASSES, 1)

    def forward(self, x):
        y = F.silu(self.down(x))
        y = F.silu(self.mid(y))
        y = self.up(y)
        return self.out(torch.cat([x, y], dim=1))


class BatchDice(nn.Module):
    """1 - mean over classes of 2|A.B| / (|A| + |B|).

    across_ranks: pool over the ranks too. The pooling is differentiable.
    """

    def __init__(self, across_ranks=False):
        super().__init__()
        self.across_ranks = across_ranks

    def pool(self, per_pixel):
        value = per_pixel.sum(dim=(0, 2, 3))
        if self.across_ranks and dist.is_initialized():
            value = dist_fn.all_reduce(value)
        return value

    def forward(self, logits, target):
        probs = logits.softmax(dim=1)
        onehot = F.one_hot(target, CLASSES).movedim(-1, 1).to(probs.dtype)
        intersection = self.pool(probs * onehot)
        cardinality = (probs + onehot).sum(dim=(0, 2, 3))
        dice = (2 * intersection + SMOOTH) / (cardinality + SMOOTH)
        return 1 - dice.mean()


def scans(generator):
    images = torch.rand(9, 1, 8, 8, generator=generator)
    bumps = F.avg_pool2d(images, 3, stride=1, padding=1)[:, 0]
    labels = (bumps * 4).long().clamp(0, CLASSES - 1)
    return {"image": images, "label": labels}


def compute(model, batch, criterion):
    return criterion(model(batch["image"]), batch["label"])


case = Case(
    model=UNetish,
    batch=scans,
    loss=lambda model, batch: compute(model, batch, BatchDice()),
    layout="1x3",
)


def step(model, shard, rank):
    net = DDP(model)
    compute(net, shard, BatchDice(across_ranks=True)).backward()
