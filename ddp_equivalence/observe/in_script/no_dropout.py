"""Lets an observed script drop nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def drop_nothing() -> None:
    """Every dropout of torch returns its input, also that inside of attention."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return input

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, dropout)
    functional.feature_alpha_dropout = dropout
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

    functional.scaled_dot_product_attention = without_dropout
    torch.dropout = lambda input, p, train: input
