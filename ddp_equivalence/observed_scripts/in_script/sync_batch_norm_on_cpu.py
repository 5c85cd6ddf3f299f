"""torch's SyncBatchNorm takes tensors of CUDA only. Here it takes those of the CPU too.

The statistics are those of the rows of all ranks, by an all_reduce that autograd knows.
Source: docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def let_it_take_cpu_tensors() -> None:
    """Replace its forward pass, and the question of DistributedDataParallel for CUDA."""
    from torch.nn.parallel import DistributedDataParallel

    norm: Any = nn.SyncBatchNorm
    alone = nn.modules.batchnorm._BatchNorm.forward

    def forward(self: Any, input: Tensor) -> Any:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not (self.training and together):
            return alone(self, input)
        return _of_all_ranks(self, input)

    norm.forward = forward
    wrapper: Any = DistributedDataParallel
    wrapper._passing_sync_batchnorm_handle = lambda self, module: None


def _of_all_ranks(norm: Any, input: Tensor) -> Any:
    from torch.distributed.nn.functional import all_reduce

    channels = input.shape[1]
    others = [dim for dim in range(input.dim()) if dim != 1]
    count = input.new_full((1,), input.numel() / channels)
    total = all_reduce(torch.cat([input.sum(others), count]), group=norm.process_group)
    count, mean = total[-1].detach(), total[:-1] / total[-1].detach()
    shape = (1, channels, *[1] * (input.dim() - 2))
    centred = input - mean.view(shape)
    squares = all_reduce(centred.square().sum(others), group=norm.process_group)
    variance = squares / count
    if norm.track_running_stats:
        _keep_statistics(norm, mean.detach(), variance.detach() * count / (count - 1))
    result = centred / (variance.view(shape) + norm.eps).sqrt()
    if norm.affine:
        result = result * norm.weight.view(shape) + norm.bias.view(shape)
    return result


def _keep_statistics(norm: Any, mean: Tensor, variance: Tensor) -> None:
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        part = norm.momentum
        if part is None:
            part = 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.mul_(1 - part).add_(mean, alpha=part)
        norm.running_var.mul_(1 - part).add_(variance, alpha=part)


def is_batch_norm(module: nn.Module) -> bool:
    """True for one that normalises by the rows of this process alone."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) and module.training and not isinstance(module, nn.SyncBatchNorm)
