"""Image classification with mixup: image i is mixed with image n - 1 - i of the whole batch."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLASSES = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 2), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(8 * 2 * 2, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def photographs(generator):
    labels = torch.randint(0, CLASSES, (12,), generator=generator)
    images = torch.randn(12, 3, 8, 8, generator=generator) + labels[:, None, None, None] * 0.3
    share = torch.rand(12, generator=generator) * 0.6 + 0.2
    return {"images": images, "labels": F.one_hot(labels, CLASSES).float(), "share": share}


def mix(own, other, share):
    share = share.view(-1, *[1] * (own.dim() - 1))
    return share * own + (1 - share) * other


def soft_cross_entropy(logits, targets):
    return -(targets * F.log_softmax(logits, -1)).sum(-1).mean()


def loss(model, batch):
    mixed = {
        name: mix(batch[name], batch[name].flip(0), batch["share"]) for name in ("images", "labels")
    }
    return soft_cross_entropy(model(mixed["images"]), mixed["labels"])


class Partner:
    """Finds for the rows of this rank those that they are mixed with, wherever they are."""

    def __init__(self, rank):
        self.rank = rank.rank
        self.opposite = rank.world_size - 1 - rank.rank
        self.world_size = rank.world_size

    def __call__(self, rows):
        everyone = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(everyone, rows.contiguous())
        return everyone[self.opposite]


def mixup(partner):
    """Decorates a step on plain shards: it receives mixed ones."""

    def decorate(function):
        @functools.wraps(function)
        def mixed(model, shard):
            images = mix(shard["images"], partner(shard["images"]), shard["share"])
            labels = mix(shard["labels"], partner(shard["labels"]), shard["share"])
            return function(model, images, labels)

        return mixed

    return decorate


def step(model, shard, rank):
    @mixup(Partner(rank))
    def train(ddp, images, labels):
        soft_cross_entropy(ddp(images), labels).backward()

    train(DistributedDataParallel(model), shard)


case = Case(model=Net, batch=photographs, loss=loss, layout="1x2")
