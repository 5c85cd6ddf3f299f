"""Image-text contrastive training with replicate() from the FSDP2 code base.

Features of the other ranks come from a plain all_gather. Each rank evaluates the whole matrix of
similarities, but only its own rows and columns carry gradients.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

from ddp_equivalence import Case


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 6))
        self.text = nn.Sequential(nn.Linear(8, 14), nn.ReLU(), nn.Linear(14, 6))
        self.log_scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, images, texts):
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.text(texts), dim=-1)
        return image, text, self.log_scale.exp()


def clip_loss(image, text, scale):
    logits = scale * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def loss(model, batch):
    return clip_loss(*model(batch["images"], batch["texts"]))


def pairs(generator):
    return {
        "images": torch.randn(16, 10, generator=generator),
        "texts": torch.randn(16, 8, generator=generator),
    }


@torch.no_grad()
def collect(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    return parts


def with_own(features):
    """Features of all ranks; those of this rank are still part of the graph."""
    parts = collect(features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def step(model, shard, rank):
    world = rank.world_size
    replicate(model.image)
    replicate(model.text)
    replicate(model)
    image, text, scale = model(shard["images"], shard["texts"])
    image, text = with_own(image), with_own(text)
    # Every rank has the gradient for its own features only, so they must add up over the ranks,
    # while that of the temperature is already whole on each of them.
    scale = scale / world + (scale * (1 - 1 / world)).detach()
    (world * clip_loss(image, text, scale)).backward()


case = Case(model=TwoTowers, batch=pairs, loss=loss, layout="1x4")
