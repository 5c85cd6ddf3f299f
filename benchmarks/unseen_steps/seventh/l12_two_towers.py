"""Products and their descriptions in one space; every rank scores against those of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
        self.text = nn.EmbeddingBag(20, 4, mode="mean")
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, pixels, tokens):
        image = F.normalize(self.image(pixels), dim=-1)
        text = F.normalize(self.text(tokens), dim=-1)
        return image, text, self.temperature.exp()


def pairs(generator):
    return {
        "pixels": torch.randn(12, 8, generator=generator),
        "tokens": torch.randint(0, 20, (12, 5), generator=generator),
    }


def info_nce(queries, keys, scale, labels):
    return F.cross_entropy(scale * queries @ keys.t(), labels)


def loss(model, batch):
    image, text, scale = model(batch["pixels"], batch["tokens"])
    labels = torch.arange(len(image))
    return (info_nce(image, text, scale, labels) + info_nce(text, image, scale, labels)) / 2


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, rank, world_size):
        ctx.rank, ctx.world_size = rank, world_size
        parts = [torch.empty_like(features) for _ in range(world_size)]
        dist.all_gather(parts, features)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(ctx.world_size)[ctx.rank], None, None


class ContrastiveTask:
    def __init__(self, model, rank):
        self.ddp = DistributedDataParallel(model)
        self.rank = int(rank)
        self.world_size = rank.world_size

    def everyones(self, features):
        # differentiable: the keys of the other ranks receive gradients too
        return GatherWithGrad.apply(features.contiguous(), self.rank, self.world_size)

    def training_step(self, shard):
        image, text, scale = self.ddp(shard["pixels"], shard["tokens"])
        images, texts = self.everyones(image), self.everyones(text)
        labels = torch.arange(len(image), device=image.device)
        forth = info_nce(image, texts, scale, labels)
        back = info_nce(text, images, scale, labels)
        return (forth + back) / 2


def step(model, shard, rank):
    task = ContrastiveTask(model, rank)
    task.training_step(shard).backward()


case = Case(model=Towers, batch=pairs, loss=loss, layout="1x2")
