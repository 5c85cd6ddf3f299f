"""A model with a branch that only the last two examples use, so that most ranks do not use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence.case.models.model import OUTPUT_SIZE, ROW_SIZE, CatalogueModel, rows


class Branch(nn.Module):
    """Only inputs whose first column is above 0.5 pass through ``self.branch``."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(ROW_SIZE, OUTPUT_SIZE)
        self.branch = nn.Linear(ROW_SIZE, OUTPUT_SIZE)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.trunk(inputs)
        chosen = (inputs[:, 0] > 0.5).nonzero().squeeze(1)
        if len(chosen):
            outputs = outputs.index_add(0, chosen, self.branch(inputs[chosen]))
        return outputs


def flagged_rows(generator: torch.Generator, examples: int) -> Tensor:
    """Shape (examples, ROW_SIZE); column 0 is 1 for the last two examples and 0 for the others."""
    inputs = rows(generator, examples)
    inputs[:, 0] = (torch.arange(examples) >= examples - 2).to(inputs.dtype)
    return inputs


MODEL = CatalogueModel("branch", Branch, inputs=flagged_rows, unused_on_some_ranks=True)
