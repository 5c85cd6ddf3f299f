"""Imported once, in the server that ranks are forked from. Nothing here may start a thread."""

from __future__ import annotations

import gc

import torch._dynamo  # DDP's constructor imports it: 1 s a rank unless it is here
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

import ddp_equivalence.measurement.on_rank  # noqa: F401

# What is here now stays: a collection in a rank then neither walks nor copies these pages.
gc.collect()
gc.freeze()
