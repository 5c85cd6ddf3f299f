"""Text/image dual encoder with an InfoNCE objective over the global batch, sharded with FSDP2."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class DualEncoderConfig:
    image_dim: int = 9
    text_dim: int = 7
    width: int = 13
    embed_dim: int = 6
    temperature: float = 0.3


class Tower(nn.Module):
    def __init__(self, in_dim: int, cfg: DualEncoderConfig):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(in_dim, cfg.width), nn.GELU(), nn.LayerNorm(cfg.width))
        self.proj = nn.Linear(cfg.width, cfg.embed_dim, bias=False)

    def forward(self, x):
        return F.normalize(self.proj(self.body(x)), dim=-1)


class DualEncoder(nn.Module):
    def __init__(self, cfg: DualEncoderConfig | None = None):
        super().__init__()
        self.cfg = cfg or DualEncoderConfig()
        self.image = Tower(self.cfg.image_dim, self.cfg)
        self.text = Tower(self.cfg.text_dim, self.cfg)

    def forward(self, images, texts):
        return self.image(images), self.text(texts)


def clip_objective(query_i, query_t, keys_i, keys_t, first, temperature):
    """Symmetric InfoNCE of the queries against all keys; query 0 belongs to key ``first``."""
    labels = torch.arange(len(query_i), device=query_i.device) + first
    per_image = query_i @ keys_t.T / temperature
    per_text = query_t @ keys_i.T / temperature
    return 0.5 * (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels))


class ContrastiveTrainer:
    def __init__(self, model: DualEncoder, rank):
        self.rank = rank
        for tower in (model.image, model.text):
            fully_shard(tower)
        self.model = fully_shard(model)

    def gather(self, features):
        # differentiable: the backward adds up what all ranks need of our features
        return torch.cat(dist_fn.all_gather(features))

    def training_step(self, batch):
        image, text = self.model(batch["images"], batch["texts"])
        first = self.rank.rank * len(image)
        return clip_objective(
            image,
            text,
            self.gather(image),
            self.gather(text),
            first,
            self.model.cfg.temperature,
        )

    def fit_one(self, batch):
        loss = self.training_step(batch)
        loss.backward()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        return logged / self.rank.world_size


def make_batch(generator):
    return {
        "images": torch.randn(16, 9, generator=generator),
        "texts": torch.randn(16, 7, generator=generator),
    }


def loss(model, batch):
    image, text = model(batch["images"], batch["texts"])
    return clip_objective(image, text, image, text, 0, model.cfg.temperature)


def step(model, shard, rank):
    ContrastiveTrainer(model, rank).fit_one(shard)


case = Case(model=DualEncoder, batch=make_batch, loss=loss, layout="1x4")
