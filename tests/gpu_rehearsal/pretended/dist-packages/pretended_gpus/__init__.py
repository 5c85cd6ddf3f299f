"""Pretended GPUs: torch.cuda says that there are some, and computes on the CPU; NCCL is gloo.

``settings`` says what the GPUs are like. Each other module replaces one topic of torch.
"""

from __future__ import annotations

import warnings
from importlib import import_module


def install() -> None:
    """Replace the parts of torch, which has just been imported, that would need a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch.distributed.optim")  # compiles functions of torch as they are
    from pretended_gpus import (
        amp,
        backward,
        collectives,
        data_parallel,
        distributed_data_parallel,
        generators,
        streams,
        sync_batch_norm,
        tensors,
        torch_cuda,
    )

    torch_cuda.install()
    streams.install()
    generators.install()
    tensors.install()
    collectives.install()
    data_parallel.install()
    distributed_data_parallel.install()
    sync_batch_norm.install()
    amp.install()
    backward.install()
