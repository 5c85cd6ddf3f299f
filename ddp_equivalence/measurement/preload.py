"""Imported once by the server that ranks are forked from. Nothing here may start a thread."""

from __future__ import annotations

import gc

import torch._dynamo  # the constructor of DDP imports it, which takes each rank 1 s (torch 2.13)
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

import ddp_equivalence.measurement.on_rank  # noqa: F401

# The objects that exist now are never collected, so that a collection in a rank neither walks the
# memory that it shares with the server nor copies it.
gc.collect()
gc.freeze()
