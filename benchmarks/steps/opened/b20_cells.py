"""Cell segmentation: cross-entropy plus the Dice score of the whole batch, with batch statistics."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class BatchStatistics(nn.Module):
    """Normalizes channels; ``total`` adds over whatever shares the batch."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.total = None

    def forward(self, x):
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        count = x.new_tensor(x.numel() / x.shape[1])
        if self.total is not None:
            sums, count = self.total(sums), self.total(count)
        mean, square = sums[:, :, None, None] / count
        return (x - mean) / (square - mean.square() + 1e-5).sqrt() * self.weight + self.bias


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = BatchStatistics(4)
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.out(F.softplus(self.norm(self.inp(x)))).squeeze(1)


def cells(generator):
    image = torch.randn(8, 1, 6, 6, generator=generator)
    level = torch.linspace(-1, 1, 8).view(-1, 1, 1)
    return {"image": image + level[:, None], "mask": (image[:, 0] > level).double()}


def dice_sums(logits, mask):
    p = logits.sigmoid()
    return torch.stack([(p * mask).sum(), p.sum() + mask.sum()])


def dice(sums):
    return 1 - (2 * sums[0] + 1) / (sums[1] + 1)


def loss(model, b):
    logits, mask = model(b["image"]), b["mask"].to(b["image"].dtype)
    return F.binary_cross_entropy_with_logits(logits, mask) + dice(dice_sums(logits, mask))


case = Case(model=Segmenter, batch=cells, loss=loss, layout="1x2")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def all_sum(x, differentiable=False):
    if differentiable:
        return _Sum.apply(x)
    x = x.clone()
    dist.all_reduce(x)
    return x


def step(model, shard, rank):
    model.norm.total = all_sum
    logits, mask = model(shard["image"]), shard["mask"].to(shard["image"].dtype)
    pixels = all_sum(torch.tensor(mask.numel()))
    bce = F.binary_cross_entropy_with_logits(logits, mask, reduction="sum") / pixels
    score = dice(all_sum(dice_sums(logits, mask), differentiable=True))
    (bce + score).backward()
    model.norm.total = None
    for p in model.parameters():
        dist.all_reduce(p.grad)
