"""Mixed precision: autocast for CUDA is that for the CPU, and GradScaler has CUDA's dtypes."""

from __future__ import annotations

from typing import Any

import torch

from pretended_gpus import runtime


def install() -> None:
    """Replace the functions that turn autocast on, and the one that unscales gradients."""
    owner: Any = torch
    enable, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    of_cpu = [torch.get_autocast_dtype("cpu")]

    def set_autocast_enabled(*arguments: Any) -> None:
        if arguments[0] == "cuda":
            if not torch.is_autocast_enabled("cuda"):
                of_cpu[0] = torch.get_autocast_dtype("cpu")
            enable("cpu", *arguments[1:])
        enable(*arguments)

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        if device_type == "cuda":
            set_dtype("cpu", dtype if torch.is_autocast_enabled("cuda") else of_cpu[0])

    def unscaled(tensors: Any, found: torch.Tensor, factor: torch.Tensor) -> None:
        # CUDA's kernel is compiled for double, float and half.
        if runtime.is_initialised() and any(one.dtype == torch.bfloat16 for one in tensors):
            raise NotImplementedError(
                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
            )
        unscale(tensors, found, factor)

    owner.set_autocast_enabled, owner.set_autocast_dtype = set_autocast_enabled, set_autocast_dtype
    owner._amp_foreach_non_finite_check_and_unscale_ = unscaled
