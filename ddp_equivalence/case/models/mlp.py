"""Two linear layers with a ReLU between them."""

from __future__ import annotations

from torch import nn

from ddp_equivalence.case.models.model import HIDDEN_SIZE, OUTPUT_SIZE, ROW_SIZE, CatalogueModel


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(ROW_SIZE, HIDDEN_SIZE), nn.ReLU(), nn.Linear(HIDDEN_SIZE, OUTPUT_SIZE)
    )


MODEL = CatalogueModel("mlp", build)
