"""A GPT of four layers with tied weights, its loss and its batch of 16 token sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 64, 4, 4, 101, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(hidden)).split(WIDTH, dim=2)
        query, key, value = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(hidden))))
        return hidden + added


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = (
            nn.Sequential(*(Block() for _ in range(LAYERS))),
            nn.LayerNorm(WIDTH),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def token_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCABULARY, (16, LENGTH + 1), generator=generator)}


def next_token_loss(model: nn.Module, batch: Any) -> Tensor:
    ids = batch["ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
