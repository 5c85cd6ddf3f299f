"""Lets an observed script drop nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
)


def drop_nothing() -> None:
    """Every dropout of torch returns its input, also that inside of attention."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return input

    for name in DROPOUTS:
        setattr(functional, name, dropout)
    attention: Any = functional.scaled_dot_product_attention

    def without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **named: Any,
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, **named)

    of_torch: Any = torch
    of_functional: Any = functional
    of_functional.scaled_dot_product_attention = without_dropout
    of_torch.dropout = dropout
