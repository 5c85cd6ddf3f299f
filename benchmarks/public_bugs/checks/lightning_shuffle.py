"""Lightning's Trainer with a loader that shuffles; nobody has set a seed."""

from __future__ import annotations

from small_regression import build_model, loss, rows

from ddp_equivalence import Case
from ddp_equivalence.adapters.lightning import lightning_step

case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")
step = lightning_step(loss, shuffle=True)
options = {"compare": "update"}
