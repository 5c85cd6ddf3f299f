"""Image and caption towers trained with a symmetric contrastive loss over the batch of all ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, WORDS, PIXELS, DIM = 50, 6, 24, 10


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.out = nn.Linear(16, DIM)

    def forward(self, tokens):
        return self.out(torch.tanh(self.words(tokens)).mean(dim=1))


class PairModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 16), nn.GELU(), nn.Linear(16, DIM))
        self.text = TextTower()
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, pixels, tokens):
        image = F.normalize(self.image(pixels), dim=-1)
        text = F.normalize(self.text(tokens), dim=-1)
        return image, text, self.log_scale.exp()


def symmetric(image, text, scale):
    logits = scale * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class FeatureGather:
    """Collects the features of all ranks so that every rank sees the whole similarity matrix."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, features):
        parts = [torch.empty_like(features) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, features.detach().contiguous())
        parts[self.rank.rank] = features  # our own part keeps its graph
        return torch.cat(parts)


def make_batch(generator):
    pixels = torch.randn(12, PIXELS, generator=generator)
    tokens = torch.randint(0, VOCAB, (12, WORDS), generator=generator)
    return {"pixels": pixels, "tokens": tokens}


def loss(model, batch):
    return symmetric(*model(batch["pixels"], batch["tokens"]))


def step(model, shard, rank):
    ddp = DDP(model)
    gather = FeatureGather(rank)
    image, text, scale = ddp(shard["pixels"], shard["tokens"])
    symmetric(gather(image), gather(text), scale).backward()


case = Case(model=PairModel, batch=make_batch, loss=loss, layout="1x2")
