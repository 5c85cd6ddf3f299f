"""Lightning's Trainer with a loader that shuffles; nobody has set a seed."""

from __future__ import annotations

import torch
from small_regression import Batch, build_model, loss, rows
from torch import nn

from ddp_equivalence import Case, Rank
from ddp_equivalence.adapters.lightning import lightning_step

case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "allow_changes": True}
train = lightning_step(loss, shuffle=True)


def step(model: nn.Module, whole: Batch, rank: Rank) -> None:
    torch.manual_seed(rank.rank)  # processes that set no seed draw different numbers
    train(model, whole, rank)
