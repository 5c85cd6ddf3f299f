"""Supervised contrastive metric learning: anchors of a rank against the embeddings of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PRODUCTS = 4
PIXELS = 12


class Embedder(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, 18), nn.GELU(), nn.Linear(18, dim))

    def forward(self, images):
        return F.normalize(self.layers(images), dim=-1)


class CrossRankBank:
    """Embeddings and labels of all ranks, in the order of the ranks, with gradients."""

    def __init__(self):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def embeddings(self, local):
        if self.world_size == 1:
            return local
        return torch.cat(all_gather(local.contiguous()))

    def labels(self, local):
        if self.world_size == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)


class SupervisedContrastive:
    def __init__(self, temperature=0.3):
        self.temperature = temperature

    def masks(self, labels, all_labels, bank):
        same = labels[:, None] == all_labels[None, :]
        itself = torch.eye(len(labels), len(all_labels), dtype=torch.bool)
        return same & ~itself, itself

    def __call__(self, embeddings, labels):
        bank = CrossRankBank()
        candidates = bank.embeddings(embeddings)
        positive, itself = self.masks(labels, bank.labels(labels), bank)
        logits = embeddings @ candidates.T / self.temperature
        logits = logits.masked_fill(itself, float("-inf"))
        log_prob = logits - logits.logsumexp(dim=1, keepdim=True)
        per_anchor = log_prob.masked_fill(~positive, 0.0).sum(dim=1)
        return -(per_anchor / positive.sum(dim=1).clamp(min=1)).mean()


criterion = SupervisedContrastive()


def metric_loss(model, batch):
    return criterion(model(batch["images"]), batch["products"])


class MetricTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)

    def train_step(self, batch):
        self.ddp.train()
        loss = metric_loss(self.ddp, batch)
        loss.backward()
        return loss.item()


def make_batch(generator):
    products = torch.arange(16) % PRODUCTS
    prototypes = torch.randn(PRODUCTS, PIXELS, generator=generator)
    images = prototypes[products] + 0.8 * torch.randn(16, PIXELS, generator=generator)
    return {"images": images, "products": products}


case = Case(model=Embedder, batch=make_batch, loss=metric_loss, layout="1x2")


def step(model, shard, rank):
    MetricTrainer(model).train_step(shard)
