"""The defaults that decide what is reduced, read and rounded, as the installed packages have them.

An upgrade may change one of them, and with it what a training script does that names none.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

CALLABLES = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.nn.SyncBatchNorm",
    "torch.nn.utils.clip_grad_norm_",
    "torch.distributed.init_process_group",
    "torch.distributed.new_group",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.MixedPrecisionPolicy",
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "torch.utils.data.DataLoader",
    "torch.utils.data.distributed.DistributedSampler",
    "torch.amp.GradScaler",
    "torch.optim.SGD",
    "torch.optim.AdamW",
    "accelerate.Accelerator",
    "accelerate.utils.DataLoaderConfiguration",
    "accelerate.utils.GradientAccumulationPlugin",
    "accelerate.utils.DistributedDataParallelKwargs",
    "transformers.TrainingArguments",
    "lightning.Trainer",
    "lightning.pytorch.strategies.DDPStrategy",
    "lightning.fabric.Fabric",
    "trl.SFTConfig",
)
"""Functions and classes, whose defaults are those of their parameters."""

NOT_OF_TRAINING = (
    *("hub_", "push_to_hub", "logging_", "log_", "report_to", "run_name", "disable_tqdm"),
    *("save_", "output_dir", "eval_", "project", "trackio_", "include_for_metrics"),
)
"""What the names of parameters begin with that say where results go, and nothing of training."""

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LONGEST = 200


def defaults() -> Mapping[str, str]:
    """Name -> default, as text: ``torch.optim.SGD(momentum)`` -> "0". Packages that are not
    installed, or cannot be imported, are left out.
    """
    return dict(sorted([*_of_callables(), *_of_torch()]))


def _of_callables() -> Iterator[tuple[str, str]]:
    for name in CALLABLES:
        found = _found(name)
        if found is None:
            continue
        try:
            parameters = inspect.signature(found).parameters
        except (TypeError, ValueError):
            continue
        for parameter in parameters.values():
            default = parameter.default
            if default is inspect.Parameter.empty or parameter.name.startswith(NOT_OF_TRAINING):
                continue
            if is_dataclass(default) and not isinstance(default, type):  # it may get a new field
                for field in fields(default):
                    value = getattr(default, field.name)
                    yield f"{name}({parameter.name}.{field.name})", _text(value)
            else:
                yield f"{name}({parameter.name})", _text(default)


def _found(name: str) -> Any:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return None
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except Exception:  # a package that does not fit the others, which is no matter of the record
        return None


def _of_torch() -> Iterator[tuple[str, str]]:
    import torch
    from torch.distributed import distributed_c10d

    yield "torch.get_default_dtype()", _text(torch.get_default_dtype())
    precision = torch.get_float32_matmul_precision()
    yield "torch.get_float32_matmul_precision()", _text(precision)
    enabled = torch.are_deterministic_algorithms_enabled()
    yield "torch.are_deterministic_algorithms_enabled()", _text(enabled)
    for name in ("allow_tf32", "benchmark", "deterministic"):
        yield f"torch.backends.cudnn.{name}", _text(getattr(torch.backends.cudnn, name))
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if hasattr(distributed_c10d, name):
            yield f"torch.distributed.{name}", _text(getattr(distributed_c10d, name))


def _text(value: object) -> str:
    return ADDRESS.sub("", repr(value))[:LONGEST]
