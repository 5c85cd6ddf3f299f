"""Images and captions: each is told from those of all ranks by its similarity."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PIXELS, WORDS, SPACE = 9, 25, 6


class Gather(torch.autograd.Function):
    """The rows of all ranks, in the order of the ranks."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        return gradient[dist.get_rank()]


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 12), nn.ReLU(), nn.Linear(12, SPACE))
        self.caption = nn.EmbeddingBag(WORDS, SPACE, mode="mean")
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, caption):
        return (
            F.normalize(self.image(image), dim=-1),
            F.normalize(self.caption(caption), dim=-1),
            self.log_scale.exp(),
        )


def make_batch(generator):
    n = 12
    return {
        "image": torch.randn(n, PIXELS, generator=generator),
        "caption": torch.randint(0, WORDS, (n, 4), generator=generator),
    }


def both_ways(ours, theirs, scale, first):
    image, caption = ours
    images, captions = theirs
    goal = torch.arange(len(image)) + first
    to_captions = F.cross_entropy(scale * image @ captions.T, goal)
    to_images = F.cross_entropy(scale * caption @ images.T, goal)
    return (to_captions + to_images) / 2


def loss(model, batch):
    image, caption, scale = model(batch["image"], batch["caption"])
    return both_ways((image, caption), (image, caption), scale, first=0)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    image, caption, scale = ddp(shard["image"], shard["caption"])
    everyone = [Gather.apply(rows).flatten(0, 1) for rows in (image, caption)]
    first = rank.rank * len(image)
    both_ways((image, caption), everyone, scale, first).backward()


case = Case(model=Pairs, batch=make_batch, loss=loss, layout="1x2")
