"""Semantic segmentation with online hard example mining: only the hardest quarter of the labelled pixels of the global
batch counts. DDP averages, so the sum over kept pixels is scaled with the world size."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

CLASSES, KEEP = 5, 0.25


class Segmenter(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.context = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.skip = nn.Conv2d(3, width, 1)
        self.classify = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image):
        h = F.relu(self.down(image))
        h = F.relu(self.context(h) + h)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.classify(h + self.skip(image))


def build_model():
    return Segmenter()


def make_batch(generator):
    n = 12
    contrast = torch.linspace(0.5, 3.0, n)[:, None, None, None]
    return {
        "image": contrast * torch.randn(n, 3, 8, 8, generator=generator),
        "label": torch.randint(0, CLASSES, (n, 8, 8), generator=generator),
    }


def pixel_losses(logits, label):
    return F.cross_entropy(logits, label, reduction="none").flatten()


def kth_largest(values, fraction):
    k = max(1, int(fraction * values.numel()))
    return values.topk(k).values[-1]


def loss(model, batch):
    pixels = pixel_losses(model(batch["image"]), batch["label"])
    hard = pixels >= kth_largest(pixels.detach(), KEEP)
    return pixels[hard].sum() / hard.sum()


def gather_flat(values):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


class HardPixels:
    def __init__(self, fraction, rank):
        self.fraction = fraction
        self.rank = rank
        self.worst = None

    def __call__(self, logits, label):
        pixels = pixel_losses(logits, label)
        values = pixels.detach()
        self.worst = gather_flat(values.max().reshape(1)).max()
        threshold = kth_largest(values, self.fraction)
        hard = pixels >= threshold
        kept = hard.sum()
        dist.all_reduce(kept)
        return self.rank.world_size * pixels[hard].sum() / kept


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    criterion = HardPixels(KEEP, rank)
    value = criterion(ddp(shard["image"]), shard["label"])
    value.backward()
