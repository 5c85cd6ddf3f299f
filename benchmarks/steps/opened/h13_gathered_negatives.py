"""Image-text retrieval: each image looks for its caption among those of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

PAIRS, PIXELS, WORDS, WIDTH = 12, 10, 15, 6


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.text = nn.EmbeddingBag(WORDS, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        a, b = self.image(image), self.text(text)
        return F.normalize(a, dim=-1), F.normalize(b, dim=-1), self.temperature.exp()


class Gather(torch.autograd.Function):
    """All ranks' rows. What others do with this rank's rows comes back in backward."""

    @staticmethod
    def forward(ctx, rows, rank, world_size):
        ctx.rank, ctx.count = rank, len(rows)
        parts = [torch.empty_like(rows) for _ in range(world_size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG if gradient.is_cuda else dist.ReduceOp.MAX)
        start = ctx.rank * ctx.count
        return gradient[start : start + ctx.count], None, None


def contrast(queries, keys, temperature, first=0):
    wanted = torch.arange(first, first + len(queries))
    return F.cross_entropy(temperature * queries @ keys.T, wanted, reduction="sum")


def pairs(generator):
    return {
        "image": torch.randn(PAIRS, PIXELS, generator=generator),
        "text": torch.randint(0, WORDS, (PAIRS, 4), generator=generator),
    }


def loss(model, batch):
    image, text, temperature = model(**batch)
    both = contrast(image, text, temperature) + contrast(text, image, temperature)
    return both / (2 * PAIRS)


case = Case(model=Clip, batch=pairs, loss=loss, layout="1x3")


def step(model, shard, rank):
    image, text, temperature = model(**shard)
    images = Gather.apply(image, rank.rank, rank.world_size)
    texts = Gather.apply(text, rank.rank, rank.world_size)
    first = rank.rank * len(image)
    both = contrast(image, texts, temperature, first) + contrast(text, images, temperature, first)
    (both / (2 * PAIRS)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
