"""The models of the catalogue. A new model is one file here and one line in ``MODELS``."""

from __future__ import annotations

from ddp_equivalence.case.models import (
    attention,
    batch_norm,
    branch,
    conv,
    dropout,
    frozen,
    linear,
    mlp,
    odd_shapes,
    recurrent,
    sparse_embedding,
)
from ddp_equivalence.case.models.model import CatalogueModel

MODELS: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        linear.LINEAR,
        linear.LINEAR_8,
        mlp.MODEL,
        conv.MODEL,
        recurrent.MODEL,
        attention.MODEL,
        branch.MODEL,
        frozen.MODEL,
        sparse_embedding.MODEL,
        batch_norm.MODEL,
        dropout.MODEL,
        odd_shapes.MODEL,
    )
}
