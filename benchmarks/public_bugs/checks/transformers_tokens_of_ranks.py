"""Trainer with a causal language model, rows of unequal length, no accumulation."""

from __future__ import annotations

import torch
from small_llama import build_model, loss, rows

from ddp_equivalence import Case
from ddp_equivalence.adapters.transformers import trainer_step

case = Case(
    model=build_model, batch=rows, loss=loss, layout="1x2", shards="own", dtype=torch.float32
)
step = trainer_step()
options = {"compare": "update"}
