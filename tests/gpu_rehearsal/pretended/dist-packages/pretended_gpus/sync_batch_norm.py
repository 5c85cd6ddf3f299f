"""nn.SyncBatchNorm, whose kernels torch has only for GPUs, written with operations of the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from pretended_gpus import runtime


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    """Normalise with the mean and the variance of the inputs of all ranks."""
    others = [dim for dim in range(inputs.dim()) if dim != 1]
    count = inputs.new_full((1,), inputs.numel() / inputs.size(1))
    sums = torch.cat([count, inputs.sum(others), inputs.square().sum(others)])
    count, *rest = all_reduce(sums, group=layer.process_group or dist.group.WORLD).split(
        [1, inputs.size(1), inputs.size(1)]
    )
    mean, variance = rest[0] / count, rest[1] / count - (rest[0] / count).square()
    shape = [inputs.size(dim) if dim == 1 else 1 for dim in range(inputs.dim())]
    normal: Tensor = (inputs - mean.view(shape)) * (variance + layer.eps).rsqrt().view(shape)
    _remember(layer, mean.detach(), (variance * count / (count - 1)).detach())
    if not layer.affine:
        return normal
    weight: Tensor = layer.weight.view(shape)
    bias: Tensor = layer.bias.view(shape)
    return normal * weight + bias


def _remember(layer: Any, mean: Tensor, variance: Tensor) -> None:
    if layer.running_mean is not None:
        layer.num_batches_tracked.add_(1)
        rate = layer.momentum or 1 / float(layer.num_batches_tracked)
        layer.running_mean.lerp_(mean, rate)
        layer.running_var.lerp_(variance, rate)


def install() -> None:
    """Replace the forward pass in training, and DDP's check that the model is on a GPU."""
    wrapper: Any = nn.parallel.DistributedDataParallel
    wrapper._passing_sync_batchnorm_handle = lambda self, module: None
    layer_type: Any = nn.SyncBatchNorm
    forward = layer_type.forward

    def synchronised(self: Any, inputs: Tensor) -> Tensor:
        alone = not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        if not runtime.is_initialised() or not self.training or alone:
            return forward(self, inputs)  # type: ignore[no-any-return]
        return _forward(self, inputs)

    layer_type.forward = synchronised
