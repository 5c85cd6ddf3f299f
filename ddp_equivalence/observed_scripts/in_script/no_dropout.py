"""Lets an observed script drop nothing."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
)

DROPOUT_P = 4
"""The place of the probability among the arguments of scaled_dot_product_attention."""


def drop_nothing() -> None:
    """Every dropout of torch returns its input, also that of attention and of recurrent layers."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return input

    for name in DROPOUTS:
        setattr(functional, name, dropout)
    attention: Any = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without_dropout(*arguments: Any, **named: Any) -> Any:
        if "dropout_p" in named:
            named["dropout_p"] = 0.0
        if len(arguments) > DROPOUT_P:
            arguments = (*arguments[:DROPOUT_P], 0.0, *arguments[DROPOUT_P + 1 :])
        return attention(*arguments, **named)

    initialise = nn.RNNBase.__init__

    @functools.wraps(initialise)
    def initialised(self: nn.RNNBase, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        self.dropout = 0.0

    nn.RNNBase.__init__ = initialised  # type: ignore[method-assign]
    of_torch: Any = torch
    of_functional: Any = functional
    of_functional.scaled_dot_product_attention = without_dropout
    of_torch.dropout = dropout
