"""A model with batch norm: every rank normalises with the statistics of its own shard."""

from __future__ import annotations

from torch import nn

from ddp_equivalence.case.models.model import HIDDEN_SIZE, OUTPUT_SIZE, ROW_SIZE, CatalogueModel


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(ROW_SIZE, HIDDEN_SIZE, bias=False),
        nn.BatchNorm1d(HIDDEN_SIZE),
        nn.Tanh(),
        nn.Linear(HIDDEN_SIZE, OUTPUT_SIZE),
    )


MODEL = CatalogueModel("batch_norm", build, batch_coupled="batch_norm_local_statistics")
