"""A model with dropout: an example's mask depends on its place in the batch that a rank gets."""

from __future__ import annotations

from torch import nn

from ddp_equivalence.case.models.model import HIDDEN_SIZE, OUTPUT_SIZE, ROW_SIZE, CatalogueModel


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(ROW_SIZE, HIDDEN_SIZE), nn.Dropout(0.5), nn.Linear(HIDDEN_SIZE, OUTPUT_SIZE)
    )


MODEL = CatalogueModel(
    "dropout",
    build,
    batch_coupled="dropout_differs_from_reference",
    draws_random_numbers=True,
)
