"""One linear layer."""

from __future__ import annotations

from torch import nn

from ddp_equivalence.case.models.model import OUTPUT_SIZE, ROW_SIZE, CatalogueModel

LINEAR = CatalogueModel("linear", lambda: nn.Linear(ROW_SIZE, OUTPUT_SIZE))

LINEAR_8 = CatalogueModel(
    "linear_8", lambda: nn.Linear(ROW_SIZE, 8), output_size=8, only_exact=True
)
"""With eight outputs, a mean over 2^k examples divides by a power of two, which is exact."""
