"""Embedding, GRU, and an output layer that shares the embedding's weight."""

from __future__ import annotations

from torch import Tensor, nn

from ddp_equivalence.case.models.model import (
    HIDDEN_SIZE,
    VOCABULARY_SIZE,
    CatalogueModel,
    token_ids,
)


class TiedGRU(nn.Module):
    """Token ids (examples, time) to logits (examples, time, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, HIDDEN_SIZE)
        self.gru = nn.GRU(HIDDEN_SIZE, HIDDEN_SIZE, batch_first=True)
        self.output = nn.Linear(HIDDEN_SIZE, VOCABULARY_SIZE)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embedding(tokens))
        logits: Tensor = self.output(hidden)
        return logits


MODEL = CatalogueModel(
    "gru_tied", TiedGRU, inputs=token_ids, output="tokens", output_size=VOCABULARY_SIZE
)
