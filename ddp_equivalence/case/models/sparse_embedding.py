"""An embedding with sparse gradients in front of a linear layer."""

from __future__ import annotations

from torch import nn

from ddp_equivalence.case.models.model import (
    HIDDEN_SIZE,
    VOCABULARY_SIZE,
    CatalogueModel,
    token_ids,
)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY_SIZE, HIDDEN_SIZE, sparse=True),
        nn.Linear(HIDDEN_SIZE, VOCABULARY_SIZE),
    )


MODEL = CatalogueModel(
    "sparse_embedding",
    build,
    inputs=token_ids,
    output="tokens",
    output_size=VOCABULARY_SIZE,
    sparse_gradients=True,
)
