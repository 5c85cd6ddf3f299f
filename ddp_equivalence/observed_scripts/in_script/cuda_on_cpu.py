"""Lets a script that needs CUDA run without it: each CUDA device is the CPU, and NCCL is gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from ddp_equivalence.observed_scripts.in_script.around import around

# What the script computes stays the same, but for the precision of float16, which becomes
# bfloat16 under autocast, and for everything that only a GPU does: kernels, streams, NCCL.

CPU = torch.device("cpu")

NOTHING_TO_DO = (
    *("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats"),
    *("init", "_lazy_init", "set_device", "set_per_process_memory_fraction", "ipc_collect"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats"),
)
NOTHING_USED = (
    *("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"),
    *("max_memory_cached", "memory_cached"),
)


def let_cuda_be_the_cpu(devices: int) -> None:
    """Replace what a script asks of CUDA. ``devices``: as many are said to be there."""
    _answer_for_cuda(devices)
    _move_nothing()
    _use_gloo()
    _scale_on_the_cpu()
    _synchronise_batch_norm_on_the_cpu()
    _Devices().__enter__()  # type: ignore[no-untyped-call]  # until the process ends


def cpu_for(value: Any, index: bool = True) -> Any:
    """The CPU, if the value names a CUDA device; the value itself otherwise. ``index``: a whole
    number names one, too.
    """
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    is_index = index and isinstance(value, int) and not isinstance(value, bool)
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    return CPU if is_index or is_cuda else value


class _Devices(TorchFunctionMode):
    """Replaces CUDA devices in the arguments of all functions of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory") and args:
            return args[0]
        if name == "record_stream":
            return None
        if named.get("device") is not None:
            named["device"] = cpu_for(named["device"])
        if name == "to" and len(args) > 1:
            args = (args[0], cpu_for(args[1]), *(cpu_for(one, index=False) for one in args[2:]))
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return func(*args, **named)


def _answer_for_cuda(devices: int) -> None:
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: devices
    cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", 0))
    cuda.is_initialized = lambda: True
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_name = lambda *_: "a CPU"
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    for name in NOTHING_TO_DO:
        if hasattr(cuda, name):
            setattr(cuda, name, _nothing())
    for name in NOTHING_USED:
        setattr(cuda, name, lambda *_, **__: 0)

    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda *_: True
    accelerator.device_count = lambda: devices
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.current_device_index = lambda: 0
    for name in ("set_device_index", "set_device_idx", "synchronize", "device_index"):
        setattr(accelerator, name, _nothing())


def _nothing() -> Callable[..., None]:
    """A function that does nothing; a new one each time, since torch's compiler compares them."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def _move_nothing() -> None:
    """``.to("cuda")`` and ``.cuda()`` leave a module where it is."""

    def moved(to: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = cpu_for(named["device"])
        return to(module, *map(cpu_for, arguments), **named)

    def stays(call: Any, one: Any, *_: Any, **__: Any) -> Any:
        return one

    around(nn.Module, "to", moved)
    for kind, name in ((nn.Module, "cuda"), (Tensor, "cuda"), (Tensor, "pin_memory")):
        around(kind, name, stays)
    for of_torch in (nn.parallel, nn):
        setattr(of_torch, "DataParallel", _NoDataParallel)  # noqa: B010  (for mypy)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(Optimizer, name):
            setattr(Optimizer, name, _nothing())


def _use_gloo() -> None:
    def begun(initialise: Any, backend: Any = None, *arguments: Any, **named: Any) -> Any:
        named.pop("device_id", None)
        return initialise("gloo", *arguments, **named)

    def grouped(new_group: Any, *arguments: Any, **named: Any) -> Any:
        return new_group(*arguments, **{**named, "backend": "gloo"})

    def wrapped(wrap: Any, ddp: Any, module: Any, *arguments: Any, **named: Any) -> None:
        for name in ("device_ids", "output_device"):
            named.pop(name, None)
        wrap(ddp, module, *[None, None, *arguments[2:]][: len(arguments)], **named)

    def meshed(make: Any, device_type: str, *arguments: Any, **named: Any) -> Any:
        return make("cpu" if device_type == "cuda" else device_type, *arguments, **named)

    distributed: Any = dist
    for name, by in (("init_process_group", begun), ("new_group", grouped)):
        around(distributed_c10d, name, by)
        setattr(distributed, name, getattr(distributed_c10d, name))
    for module in (dist, distributed_c10d):
        if hasattr(module, "get_default_backend_for_device"):
            setattr(module, "get_default_backend_for_device", _gloo)  # noqa: B010  (for mypy)
    around(device_mesh, "init_device_mesh", meshed)
    distributed.init_device_mesh = device_mesh.init_device_mesh
    around(DistributedDataParallel, "__init__", wrapped)


class _NoDataParallel(nn.Module):
    """Stands for nn.DataParallel, which calls its module directly where there is one device."""

    def __new__(cls, module: nn.Module, *_: Any, **__: Any) -> Any:
        return module


def _gloo(*_: Any) -> str:
    return "gloo"


def _scale_on_the_cpu() -> None:
    """Autocast and loss scaling for CUDA are those for the CPU."""

    def autocast(
        enter: Any, region: Any, device_type: str, dtype: Any = None, *rest: Any, **named: Any
    ) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            if dtype in (torch.float16, None):
                dtype = torch.bfloat16  # the CPU has kernels for it
        enter(region, device_type, dtype, *rest, **named)

    def scaler(make: Any, scaler: Any, device: str = "cpu", *arguments: Any, **named: Any) -> None:
        make(scaler, "cpu", *arguments, **named)

    around(torch.autocast, "__init__", autocast)
    around(torch.amp.GradScaler, "__init__", scaler)


# torch's SyncBatchNorm takes tensors of CUDA only. Here it takes those of the CPU too.
#
# The statistics are those of the rows of all ranks, by an all_reduce that autograd knows. Source:
# docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html


def _synchronise_batch_norm_on_the_cpu() -> None:
    """Replace its forward pass, and the question of DistributedDataParallel for CUDA."""
    alone = nn.modules.batchnorm._BatchNorm.forward

    def forward(self: Any, input: Tensor) -> Any:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return _of_all_ranks(self, input) if self.training and together else alone(self, input)

    norm, wrapper = nn.SyncBatchNorm, DistributedDataParallel
    norm.forward = forward  # type: ignore[method-assign]
    wrapper._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]


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
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            of_all = 1.0 / float(norm.num_batches_tracked)
            part = of_all if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean), part)
            unbiased = variance * count / (count - 1)
            norm.running_var.lerp_(unbiased.to(norm.running_var), part)
    result = centred / (variance.view(shape) + norm.eps).sqrt()
    if norm.affine:
        result = result * norm.weight.view(shape) + norm.bias.view(shape)
    return result


def is_batch_norm(module: nn.Module) -> bool:
    """True for one that normalises by the rows of this process alone."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) and module.training and not isinstance(module, nn.SyncBatchNorm)
