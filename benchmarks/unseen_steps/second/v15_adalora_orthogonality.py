"""AdaLoRA fine-tuning of a tagger: token losses, and a penalty on factors not orthogonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

TAGS, WORDS, IGNORED = 5, 37, -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class AdaLoraConfig:
    rank: int = 3
    orthogonality: float = 0.05


class SvdLinear(nn.Module):
    """A frozen layer with an update P diag(E) Q of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.P = nn.Parameter(0.5 * torch.randn(base.out_features, rank))
        self.E = nn.Parameter(0.1 * torch.randn(rank))
        self.Q = nn.Parameter(0.5 * torch.randn(rank, base.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ((x @ self.Q.T) * self.E) @ self.P.T

    def orthogonality(self) -> Tensor:
        eye = torch.eye(len(self.E), dtype=self.E.dtype, device=self.E.device)
        return (self.P.T @ self.P - eye).square().sum() + (self.Q @ self.Q.T - eye).square().sum()


class Tagger(nn.Module):
    def __init__(self, config: AdaLoraConfig, width: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width).requires_grad_(False)
        self.hidden = SvdLinear(nn.Linear(width, width), config.rank)
        self.context = SvdLinear(nn.Linear(width, width), config.rank)
        self.tags = nn.Linear(width, TAGS)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.gelu(self.hidden(self.words(ids)))
        return self.tags(x + self.context(x.mean(dim=1, keepdim=True)))

    def orthogonality(self) -> Tensor:
        adapted = [module for module in self.modules() if isinstance(module, SvdLinear)]
        return torch.stack([module.orthogonality() for module in adapted]).mean()


def tagged_sentences(generator: torch.Generator) -> Batch:
    lengths = torch.randint(3, 9, (12, 1), generator=generator)
    tags = torch.randint(TAGS, (12, 8), generator=generator)
    return {
        "ids": torch.randint(WORDS, (12, 8), generator=generator),
        "tags": tags.masked_fill(torch.arange(8) >= lengths, IGNORED),
    }


def summed_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["tags"].flatten(), ignore_index=IGNORED, reduction="sum")


def loss(model: Tagger, batch: Batch) -> Tensor:
    tagged = (batch["tags"] != IGNORED).sum()
    return summed_entropy(model, batch) / tagged + CONFIG.orthogonality * model.orthogonality()


CONFIG = AdaLoraConfig()


class AdaLoraTrainer:
    def __init__(self, model: Tagger, config: AdaLoraConfig) -> None:
        self.model, self.config = model, config

    def objective(self, batch: Batch) -> Tensor:
        tagged = (batch["tags"] != IGNORED).sum()
        dist.all_reduce(tagged)
        entropy = summed_entropy(self.model, batch) / tagged
        return entropy + self.config.orthogonality * self.model.orthogonality()

    def train_step(self, batch: Batch) -> None:
        self.objective(batch).backward()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


case = Case(model=lambda: Tagger(CONFIG), batch=tagged_sentences, loss=loss, layout="1x2")


def step(model: Tagger, shard: Batch, rank: Rank) -> None:
    AdaLoraTrainer(model, CONFIG).train_step(shard)
