"""Embedding, one causal self-attention block, and an output layer tied to the embedding."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.models.model import (
    HIDDEN_SIZE,
    VOCABULARY_SIZE,
    CatalogueModel,
    token_ids,
)


class TiedAttention(nn.Module):
    """Token ids (examples, time) to logits (examples, time, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, HIDDEN_SIZE)
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.query_key_value = nn.Linear(HIDDEN_SIZE, 3 * HIDDEN_SIZE)
        self.projection = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        query, key, value = self.query_key_value(self.norm(embedded)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.linear(embedded + self.projection(mixed), self.embedding.weight)


MODEL = CatalogueModel(
    "attention_tied", TiedAttention, inputs=token_ids, output="tokens", output_size=VOCABULARY_SIZE
)
