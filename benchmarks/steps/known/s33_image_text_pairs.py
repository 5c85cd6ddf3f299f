"""Contrastive learning of pairs: each rank compares its images with the texts of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class TwoTowers(nn.Module):
    def __init__(self, size=5):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, size))
        self.text = nn.Linear(6, size)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        images = F.normalize(self.image(images), dim=1)
        texts = F.normalize(self.text(texts), dim=1)
        return images, texts, self.log_scale.exp()


def loss(model, batch):
    images, texts, scale = model(batch["images"], batch["texts"])
    logits = scale * images @ texts.T
    return F.cross_entropy(logits, torch.arange(len(images), device=images.device))


def make_batch(generator):
    return {
        "images": torch.randn(12, 8, generator=generator),
        "texts": torch.randn(12, 6, generator=generator),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="1x2")


class ContrastiveLoss(nn.Module):
    """Rows are this rank's images, columns the texts of all ranks."""

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.labels = {}

    def get_labels(self, count, device):
        if count not in self.labels:
            self.labels[count] = torch.arange(count, device=device)
        return self.labels[count]

    def forward(self, images, texts, scale):
        if self.world_size > 1:
            texts = torch.cat(all_gather(texts))
        logits = scale * images @ texts.T
        return F.cross_entropy(logits, self.get_labels(len(images), images.device))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    criterion = ContrastiveLoss(dist.get_rank(), dist.get_world_size())
    ddp.zero_grad()
    value = criterion(*ddp(shard["images"], shard["texts"]))
    value.backward()
