"""Image-text contrastive training; every rank scores its own pairs against all of the others."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Linear(8, 5)
        self.text = nn.Linear(6, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


def loss(model, batch):
    image, text, scale = model(batch["image"], batch["text"])
    logits = scale * image @ text.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def make_batch(generator):
    return {
        "image": torch.randn(8, 8, generator=generator),
        "text": torch.randn(8, 6, generator=generator),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="1x4")


class GatherFeatures(torch.autograd.Function):
    """all_gather whose result can be differentiated."""

    @staticmethod
    def forward(ctx, features):
        ctx.rows = len(features)
        everyone = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, features.contiguous())
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        start = dist.get_rank() * ctx.rows
        return grad[start : start + ctx.rows]


class ClipLoss(nn.Module):
    def forward(self, image, text, scale):
        all_image = GatherFeatures.apply(image)
        all_text = GatherFeatures.apply(text)
        logits_per_image = scale * image @ all_text.T
        logits_per_text = scale * text @ all_image.T
        labels = torch.arange(len(image), device=image.device) + len(image) * dist.get_rank()
        image_loss = F.cross_entropy(logits_per_image, labels)
        text_loss = F.cross_entropy(logits_per_text, labels)
        return (image_loss + text_loss) / 2


def step(model, shard, rank):
    model.zero_grad()
    wrapped = DDP(model)
    criterion = ClipLoss()
    image, text, scale = wrapped(shard["image"], shard["text"])
    criterion(image, text, scale).backward()
