"""Land-cover segmentation of satellite tiles; pixels under cloud carry no label and do not count."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

CLOUD = -1


@dataclass
class SyncSettings:
    bucket_elements: int = 256
    statistics_dtype: torch.dtype = torch.bfloat16
    log_every: int = 50


class TileNet(nn.Module):
    def __init__(self, bands=4, width=6, classes=5):
        super().__init__()
        torch.manual_seed(61)
        self.down = nn.Conv2d(bands, width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.skip = nn.Conv2d(bands, width, 1)
        self.label = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        h = F.gelu(self.middle(F.gelu(self.down(x))))
        return self.label(F.gelu(self.up(h) + self.skip(x)))


def pixel_losses(model, tiles, labels):
    return F.cross_entropy(model(tiles), labels, ignore_index=CLOUD, reduction="sum"), (labels != CLOUD).sum()


def loss(model, batch):
    total, count = pixel_losses(model, batch["tile"], batch["label"])
    return total / count


class Synchronizer:
    def __init__(self, settings, world):
        self.settings, self.world = settings, world
        self.history = []

    def statistics(self, *values):
        """Several scalars of this rank in one message; their sums over the ranks."""
        message = torch.stack([v.detach().to(torch.float64) for v in values])
        message = message.to(self.settings.statistics_dtype)
        dist.all_reduce(message)
        return message.to(torch.float64)

    def gradients(self, model):
        bucket, filled = [], 0
        for p in model.parameters():
            bucket.append(p.grad)
            filled += p.numel()
            if filled >= self.settings.bucket_elements:
                self.flush(bucket)
                bucket, filled = [], 0
        if bucket:
            self.flush(bucket)

    def flush(self, grads):
        flat = torch._utils._flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        for g, piece in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
            g.copy_(piece)


def step(model, shard, rank):
    sync = Synchronizer(SyncSettings(), rank.world_size)
    total, count = pixel_losses(model, shard["tile"], shard["label"])
    all_loss, all_pixels = sync.statistics(total, count)
    sync.history.append((all_loss / all_pixels).item())
    (total / all_pixels.to(total.dtype)).backward()
    sync.gradients(model)
    return {name: p.grad for name, p in model.named_parameters()}


def tiles(g):
    label = torch.randint(0, 5, (8, 10, 10), generator=g)
    cover = torch.tensor([3, 17, 8, 31, 5, 40, 12, 21])  # cloudy pixels of each tile
    order = torch.rand(8, 100, generator=g).argsort(1).argsort(1)
    label[(order < cover.unsqueeze(1)).view(8, 10, 10)] = CLOUD
    return {"tile": torch.randn(8, 4, 10, 10, generator=g), "label": label}


case = Case(model=TileNet, batch=tiles, loss=loss, layout="1x2")
