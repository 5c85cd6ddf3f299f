"""A loop with Accelerate whose loader shuffles; nobody has set a seed."""

from __future__ import annotations

from accelerate import Accelerator
from small_regression import Batch, build_model, loss, rows
from torch import nn
from torch.utils.data import DataLoader

from ddp_equivalence import Case, Rank
from ddp_equivalence.adapters import Rows

case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")


def step(model: nn.Module, whole: Batch, rank: Rank) -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Rows(whole), batch_size=4, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    for batch in loader:
        accelerator.backward(loss(model, batch))
