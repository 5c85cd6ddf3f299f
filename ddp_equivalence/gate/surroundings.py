"""Where a run took place: versions, machine, variables, defaults, and the user's commit."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_equivalence.gate.record import standard_name
from ddp_equivalence.ranks.gpus import gpus
from ddp_equivalence.report.machine import set_variables
from ddp_equivalence.report.record import versions

PACKAGE = Path(__file__).parents[1]
MACHINE = ("processor", "vectors", "machine", "gpus")
"""Names of facts: with others, rounding is another one too, and so is the time."""


def surroundings(folder: Path) -> Mapping[str, Any]:
    """Facts by name. ``folder``: in the user's repository."""
    import torch

    cards = gpus()
    known = {name: value for name, value in versions().items() if name != "cuda_devices"}
    return {
        **known,
        "cudnn": _cudnn(),
        "driver": cards.driver,
        "gpus": [gpu.name or "unknown GPU" for gpu in cards.gpus],
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "variables": set_variables(),
        "packages": packages(),
        "hidden": hidden_by(folder),
        "commit": _commit(folder),
    }


def _cudnn() -> int | None:
    import torch

    try:
        version: int | None = torch.backends.cudnn.version()
    except RuntimeError:  # torch found another version than that which it was built for
        return None
    return version


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def packages() -> dict[str, str]:
    """Name -> version. Of several with the same name, Python imports the first one."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        if name := one.metadata["Name"]:
            found.setdefault(standard_name(name), one.version)
    return dict(sorted(found.items()))


def hidden_by(folder: Path) -> list[str]:
    """The installed packages that Python does not import from this working folder, because a folder
    or a file of the same name lies there.
    """
    files = folder.glob("*.py") if os.access(folder, os.R_OK) else ()
    folders = (one.parent for one in folder.glob("*/__init__.py"))
    importable = {one.stem for one in (*files, *folders)}
    installed = metadata.packages_distributions()
    return sorted({standard_name(one) for name in importable for one in installed.get(name, ())})


def _commit(folder: Path) -> str:
    """The commit, with "+" for changes that are not committed; "" without a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else ""
    return f"{commit}+" if changed else commit


def _git(folder: Path, *words: str) -> str:
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


@cache
def source_digest(suite: Path) -> str:
    """A hash of the source of this package, and of the suite's tests. ``suite``: their folder."""
    hashed = hashlib.sha256()
    folders = [suite / "tests" / name for name in ("equivalence", "difference")]
    tests = [path for folder in folders for path in folder.rglob("*.py")]
    others = [suite / "tests" / "diagnosis" / "test_planted_faults.py"]
    settings = [suite / "conftest.py", suite / "pytest.ini", *others]
    # In a wheel, the folder of the tests lies in the package.
    package = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "suite")]
    for root, paths in ((PACKAGE, package), (suite, [*tests, *settings])):
        for path in sorted(paths):
            name = path.relative_to(root).as_posix()
            hashed.update(f"{name}\n".encode() + path.read_bytes())
    return hashed.hexdigest()[:32]


# The defaults that decide what is reduced, read and rounded, as the installed packages have them.
#
# An upgrade may change one of them, and with it what a training script does that names none.

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
"""The beginnings of names of parameters that say where results go, and nothing of training."""

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
