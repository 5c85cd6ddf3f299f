"""Two layers, of which the first is frozen: its gradient is None on all ranks."""

from __future__ import annotations

from torch import nn

from ddp_equivalence.case.models import mlp
from ddp_equivalence.case.models.model import CatalogueModel


def build() -> nn.Module:
    model = mlp.build()
    first = next(model.children())
    first.requires_grad_(False)
    return model


MODEL = CatalogueModel("frozen", build)
