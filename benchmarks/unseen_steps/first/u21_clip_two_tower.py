"""Image-text contrastive pre-training with two small towers and a learned temperature.
Every rank scores its own pairs against the pairs of all ranks; DDP averages the gradients."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, WIDTH, EMBED = 30, 16, 12


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.body = nn.Conv2d(8, WIDTH, 3, stride=2, padding=1)
        self.proj = nn.Linear(WIDTH, EMBED, bias=False)

    def forward(self, image):
        h = F.gelu(self.body(F.gelu(self.stem(image))))
        return F.normalize(self.proj(h.mean(dim=(2, 3))), dim=-1)


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.proj = nn.Linear(WIDTH, EMBED, bias=False)

    def forward(self, ids):
        h = torch.tanh(self.mix(self.tokens(ids)))
        return F.normalize(self.proj(h.mean(dim=1)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = ImageTower()
        self.text = TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, image, ids):
        return self.image(image), self.text(ids), self.logit_scale.exp()


def build_model():
    return TwoTower()


def make_batch(generator):
    n = 16
    return {
        "image": torch.randn(n, 3, 8, 8, generator=generator),
        "ids": torch.randint(0, VOCAB, (n, 6), generator=generator),
    }


def loss(model, batch):
    image, text, scale = model(batch["image"], batch["ids"])
    logits = scale * image @ text.t()
    target = torch.arange(image.shape[0])
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


class GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks and keeps the graph."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rows = rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


def contrastive(image, text, scale, rank):
    all_image = GatherRows.apply(image)
    all_text = GatherRows.apply(text)
    target = torch.arange(image.shape[0]) + rank.rank * image.shape[0]
    per_image = scale * image @ all_text.t()
    per_text = scale * text @ all_image.t()
    return 0.5 * (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target))


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    image, text, scale = ddp(shard["image"], shard["ids"])
    contrastive(image, text, scale, rank).backward()
