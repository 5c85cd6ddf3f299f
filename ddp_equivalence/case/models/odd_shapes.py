"""A model with parameters of shape () and (0,) beside ordinary ones, and a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence.case.models.model import OUTPUT_SIZE, ROW_SIZE, CatalogueModel


class OddShapes(nn.Module):
    """A linear layer, times a parameter of shape () and a buffer of ones, plus the sum of a
    parameter of shape (0,).
    """

    ones: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(ROW_SIZE, OUTPUT_SIZE)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("ones", torch.ones(OUTPUT_SIZE))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs) * self.ones * self.scale + self.empty.sum()
        return outputs


MODEL = CatalogueModel("odd_shapes", OddShapes, scalar_parameters=True)
