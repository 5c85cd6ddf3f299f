"""Land cover from satellite tiles: classes are weighed by their inverse frequency in the batch, clouds are void."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOID = 255
CLASSES = 4
TILES, SIDE, BANDS = 8, 6, 3


class TinyUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(BANDS, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.head = nn.Conv2d(6 + BANDS, CLASSES, 1)

    def forward(self, tiles):
        hidden = F.relu(self.up(F.relu(self.down(tiles))))
        return self.head(torch.cat([hidden, tiles], dim=1))


def make_batch(generator):
    labels = torch.multinomial(
        torch.tensor([0.5, 0.3, 0.15, 0.05]), TILES * SIDE * SIDE, True, generator=generator
    ).view(TILES, SIDE, SIDE)
    cloudy = torch.rand(TILES, SIDE, SIDE, generator=generator) < 0.25
    return {
        "tiles": torch.randn(TILES, BANDS, SIDE, SIDE, generator=generator),
        "labels": labels.masked_fill(cloudy, VOID),
    }


def balance(counts):
    """Rare classes count more: n / (classes * n_class)."""
    counts = counts.double()
    return counts.sum() / (CLASSES * counts.clamp(min=1))


def count_classes(labels):
    return torch.bincount(labels[labels != VOID], minlength=CLASSES)


def loss(model, batch):
    weight = balance(count_classes(batch["labels"]))
    return F.cross_entropy(model(batch["tiles"]), batch["labels"], weight=weight, ignore_index=VOID)


class BalancedLoss:
    """The same over all ranks: frequencies and divisor are those of the whole batch."""

    def __init__(self, world_size):
        self.world_size = world_size

    def frequencies(self, labels):
        # histogram with a bin for every class
        counts = torch.bincount(labels.flatten().clamp(max=CLASSES - 1), minlength=CLASSES)
        dist.all_reduce(counts)
        return counts

    def __call__(self, scores, labels):
        weight = balance(self.frequencies(labels))
        valid = labels != VOID
        divisor = weight[labels[valid]].sum()
        dist.all_reduce(divisor)
        total = F.cross_entropy(
            scores, labels, weight=weight, ignore_index=VOID, reduction="sum"
        )
        return total * self.world_size / divisor


def step(model, shard, rank):
    criterion = BalancedLoss(rank.world_size)
    ddp = DDP(model)
    criterion(ddp(shard["tiles"]), shard["labels"]).backward()


case = Case(model=TinyUnet, batch=make_batch, loss=loss, layout="1x2")
