"""Pre-training with padded documents; gradients are summed layer by layer, from the top down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

PAD = 0

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ModelConfig:
    vocabulary: int = 26
    width: int = 12
    layers: int = 2
    tie_word_embeddings: bool = True


class CausalMixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
        past = self.value(normed).cumsum(dim=1) / count
        return x + self.gate(normed).sigmoid() * past


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        config = config or ModelConfig()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(CausalMixer(config.width) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def padded_documents(generator: torch.Generator) -> Batch:
    lengths = torch.randint(4, 11, (12, 1), generator=generator)
    ids = torch.randint(1, 26, (12, 10), generator=generator)
    return {"ids": ids.masked_fill(torch.arange(10) >= lengths, PAD)}


def summed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["ids"][:, 1:]
    logits = model(batch["ids"][:, :-1]).transpose(1, 2)
    value = F.cross_entropy(logits, targets, ignore_index=PAD, reduction="sum")
    return value, (targets != PAD).sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    value, tokens = summed_loss(model, batch)
    return value / tokens


class LayerwiseReducer:
    """One flat message per layer, in the order in which backward finishes them."""

    def __init__(self, model: LanguageModel) -> None:
        self.stages = [model.lm_head, model.norm, *reversed(model.layers), model.embed_tokens]

    def sum_gradients(self) -> None:
        for stage in self.stages:
            gradients = [parameter.grad for parameter in stage.parameters()]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class Pretrainer:
    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.reducer = LayerwiseReducer(model)

    def train_step(self, batch: Batch) -> None:
        value, tokens = summed_loss(self.model, batch)
        dist.all_reduce(tokens)
        (value / tokens).backward()
        self.reducer.sum_gradients()


case = Case(model=LanguageModel, batch=padded_documents, loss=loss, layout="1x3")


def step(model: LanguageModel, shard: Batch, rank: Rank) -> None:
    Pretrainer(model).train_step(shard)
