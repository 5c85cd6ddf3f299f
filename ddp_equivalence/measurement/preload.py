"""The imports of the server from which ranks are forked. None of them may start a thread."""

from __future__ import annotations

import gc

import torch._dynamo  # the constructor of DDP imports it, which takes each rank 1 s (torch 2.13)
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

import ddp_equivalence.measurement.on_rank  # noqa: F401

# Take all objects that exist now out of garbage collection. On a rank a collection would otherwise
# walk through the memory that the rank shares with the server, and thereby copy it.
gc.collect()
gc.freeze()
gc.enable()
