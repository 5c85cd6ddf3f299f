"""Pre-training of a small causal language model with gradient accumulation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class PretrainConfig:
    vocabulary: int = 29
    context: int = 9
    width: int = 16
    heads: int = 2
    accumulation_steps: int = 3


CONFIG = PretrainConfig()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class CausalLM(nn.Module):
    def __init__(self, config: PretrainConfig = CONFIG) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.block = Block(config.width, config.heads)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.block(self.tokens(ids) + self.positions(places)))


def packed_sequences(generator: torch.Generator) -> dict[str, Tensor]:
    size = (12, CONFIG.context + 1)
    return {"input_ids": torch.randint(CONFIG.vocabulary, size, generator=generator)}


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Pretrainer:
    def __init__(self, model: nn.Module, config: PretrainConfig = CONFIG) -> None:
        self.config = config
        self.ddp = DistributedDataParallel(model)
        self.iteration = 0

    def synchronizes(self) -> bool:
        return self.iteration % self.config.accumulation_steps == 0

    def micro_step(self, batch: dict[str, Tensor]) -> None:
        context = contextlib.nullcontext() if self.synchronizes() else self.ddp.no_sync()
        with context:
            loss = next_token_loss(self.ddp, batch)
            (loss / self.config.accumulation_steps).backward()
        self.iteration += 1

    def train_batch(self, batch: dict[str, Tensor]) -> None:
        for ids in batch["input_ids"].chunk(self.config.accumulation_steps):
            self.micro_step({"input_ids": ids})


case = Case(model=CausalLM, batch=packed_sequences, loss=next_token_loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Pretrainer(model).train_batch(shard)
