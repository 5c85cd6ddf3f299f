"""A lane is a backend on a kind of device; a run may give one up whose ranks never start."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase, one_of
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.backend_names import BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import EXCLUSIVE_NOTE, any_exclusive, why_not_shared

# A lane is a backend on a kind of device.
#
# This module says which lanes this machine has, and why it does not have the others.

NO_SPARSE_ON_NCCL = "NCCL cannot all-reduce sparse gradients"


@dataclass(frozen=True)
class Lane:
    """The backend and the kind of device that a case runs on.

    ``gloo_fallback`` is gloo on the CPU, chosen because there are too few GPUs. ``reason`` says why
    this lane was chosen; it may be "". ``ranks_share_gpus``: there are fewer GPUs than the ranks
    want. Lanes that differ in nothing else are equal. ``gpus_per_rank``: each rank drives so many
    GPUs, and sees no others.
    """

    name: str
    backend: str
    device_type: str
    reason: str = field(default="", compare=False)
    gpus_per_rank: int = 1
    ranks_share_gpus: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def drives_all_gpus(self) -> bool:
        """True for nn.DataParallel, whose single process drives all GPUs that it is given."""
        return self.name in ("data_parallel", "data_parallel_shared")


class CannotRunHere(BadCase):
    """This machine cannot run the case on the lane that was asked for; another machine may.

    ``lane``, ``layout``: the names of both. ``reason``: what the machine lacks. ``subject``: the
    step or strategy that was to run there; "" until ``check`` fills it in.
    """

    def __init__(
        self,
        field: str,
        value: object,
        right: str,
        lane: str,
        layout: str,
        reason: str,
        subject: str = "",
    ) -> None:
        super().__init__(field, value, right)
        self.lane, self.layout, self.reason, self.subject = lane, layout, reason, subject

    def __reduce__(self) -> Any:
        kind, base = super().__reduce__()
        return kind, (*base, self.lane, self.layout, self.reason, self.subject)


@lru_cache(maxsize=1)
def _counted() -> CountedGpus:
    return count_gpus()


def cuda_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES would name them."""
    return _counted().names


def missing(name: str, world_size: int, gpus_per_rank: int = 1) -> str | None:
    """The reason why lane ``name`` cannot run ``world_size`` ranks here; None if it can."""
    if name in ("gloo", "gloo_fallback"):
        return None if dist.is_gloo_available() else "this torch was built without gloo"
    if name == "gloo_cuda":
        cannot_share = world_size > len(cuda_devices()) and any_exclusive(cuda_devices())
        note = f" ({EXCLUSIVE_NOTE})" if cannot_share else ""
        return _too_few_devices(world_size if cannot_share else 1, note)
    if name == "data_parallel":
        # With a single device nn.DataParallel only calls the module.
        return _too_few_devices(max(2, world_size))
    if name == "data_parallel_shared":
        return _too_few_devices(1) or _enough_devices(
            "replicas", max(2, world_size), "data_parallel"
        )
    if name == NCCL_SHARED:
        return (
            _too_few_devices(1)
            or _enough_devices("ranks", world_size * gpus_per_rank, "nccl")
            or _cannot_share(world_size)
            or _no_backend("nccl")
        )
    note = " (one rank each)" if gpus_per_rank == 1 else f" ({gpus_per_rank} for each rank)"
    return _too_few_devices(world_size * gpus_per_rank, note) or _no_backend(name)


def _no_backend(name: str) -> str | None:
    available = dist.is_backend_available(name)
    return None if available else f"torch {torch.__version__} has no backend {name}"


def _enough_devices(what: str, wanted: int, lane: str) -> str | None:
    """The reason why nothing is shared, as ``lane`` can run; None if there are too few GPUs."""
    found = len(cuda_devices())
    if found < wanted:
        return None
    return f"needs more {what} than CUDA devices (with one for each, {lane} runs), found {found}"


def _cannot_share(world_size: int) -> str | None:
    why = why_not_shared(world_size, cuda_devices())
    if why is None:
        return None
    return f"needs {world_size} CUDA devices ({why}), found {len(cuda_devices())}"


def _too_few_devices(wanted: int, note: str = "") -> str | None:
    found = len(cuda_devices())
    if found >= wanted:
        return None
    noun = "device" if wanted == 1 else "devices"
    problem = _counted().problem
    why = f" ({problem})" if problem else ""
    return f"needs {wanted} CUDA {noun}{note}, found {found}{why}"


def choose(
    layout: Layout,
    backend: str = "auto",
    sparse_gradients: bool = False,
    may_fall_back: bool = True,
) -> Lane:
    """The lane for a layout and a backend.

    ``auto`` is NCCL with one rank per GPU if there are enough GPUs; else NCCL whose ranks share the
    GPUs that there are; else gloo on the CPU. With ``sparse_gradients`` it is gloo with CUDA
    tensors if there is a GPU. Raises BadCase for an unknown backend, and CannotRunHere for one that
    cannot run the layout on this machine, or if gloo on the CPU is all that is left and
    ``may_fall_back`` is False.
    """
    if backend not in BACKENDS:
        raise BadCase("backend", backend, one_of(BACKENDS, backend))
    if backend == "auto" and sparse_gradients and cuda_devices():
        backend = "gloo_cuda"
    if backend == "auto":
        return _nccl_or_gloo(layout, may_fall_back)
    reason = missing(backend, layout.world_size)
    if reason is not None:
        right = f"one that can run layout {layout} here, such as auto: {backend} {reason}"
        if backend == "nccl" and missing(NCCL_SHARED, layout.world_size) is None:
            right = f"{NCCL_SHARED}, whose ranks share GPUs: {backend} {reason}"
        raise CannotRunHere("backend", backend, right, backend, layout.name, reason)
    if backend == "gloo":
        return Lane("gloo", "gloo", "cpu")
    if backend == "gloo_cuda":
        notes = [NO_SPARSE_ON_NCCL] if sparse_gradients else []
        share = layout.world_size > len(cuda_devices())
        notes += ["ranks share GPUs"] if share else []
        return Lane("gloo_cuda", "gloo", "cuda", "; ".join(notes), ranks_share_gpus=share)
    if backend == NCCL_SHARED:
        return shared_lane(layout)
    return Lane(backend, backend, "cuda")


def must_share(wanted: int) -> bool:
    """True if there are GPUs, but fewer than are wanted."""
    return 0 < len(cuda_devices()) < wanted


def replicas_lane(replicas: int) -> Lane:
    """nn.DataParallel in one process, with a device for every replica if there are enough."""
    if not must_share(replicas):
        return Lane("data_parallel", "gloo", "cuda")
    return Lane("data_parallel_shared", "gloo", "cuda", f"{replicas} replicas on one device")


def shared_lane(layout: Layout, note: str = "") -> Lane:
    """NCCL with ranks that share the GPUs of this machine. ``note``: what its reason adds."""
    devices = cuda_devices()
    gpus = f"{len(devices)} GPUs"
    if len(devices) == 1:
        gpus = f"GPU {devices[0]}" if devices[0].isdigit() else devices[0]
    reason = f"{layout.world_size} ranks share {gpus} over sockets{note}"
    return Lane(NCCL_SHARED, "nccl", "cuda", reason, ranks_share_gpus=True)


def _nccl_or_gloo(layout: Layout, may_fall_back: bool) -> Lane:
    lane = NCCL_SHARED if must_share(layout.world_size) else "nccl"
    reason = missing(lane, layout.world_size)
    if reason is None:
        return choose(layout, lane)
    if may_fall_back:
        return Lane("gloo_fallback", "gloo", "cpu", reason)
    right = (
        f"smaller, as {lane} {reason}; or leave out --must-run, which allows no fall back to gloo"
    )
    raise CannotRunHere("layout", layout.name, right, lane, layout.name, reason)


def devices_of_ranks(layout: Layout, lane: Lane, devices: tuple[str, ...]) -> dict[int, str]:
    """The GPU of every rank, as CUDA_VISIBLE_DEVICES names it; empty on the CPU.

    ``devices``: the GPUs that these ranks may use. Every layout and lane begins with another of
    them, the same one in every run, so that all GPUs of a machine are used although most layouts
    have few ranks. A rank that drives several devices has all their names.
    """
    if lane.device_type != "cuda":
        return {}
    start = first_device(layout, lane, len(devices))
    turned = devices[start:] + devices[:start]
    if lane.drives_all_gpus:
        return {row.rank: ",".join(turned) for row in layout.rows}
    each = lane.gpus_per_rank
    return {
        row.rank: ",".join(
            turned[(row.rank * each + number) % len(turned)] for number in range(each)
        )
        for row in layout.rows
    }


def first_device(layout: Layout, lane: Lane, count: int) -> int:
    """The index of the device, among ``count`` of them, with which these ranks begin."""
    return zlib.crc32(f"{lane} {layout}".encode()) % count


def visible_devices(layout: Layout, lane: Lane, devices: tuple[str, ...]) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES for every rank: only the GPUs of its own simulated node.

    ``cuda:{local_rank}`` is then the rank's own GPU, as it would be on real nodes. If ranks share
    GPUs, each sees one, and a rank that drives several GPUs sees only these. ``devices``: the GPUs
    that these ranks may use.
    """
    of_rank = devices_of_ranks(layout, lane, devices)
    if lane.device_type != "cuda":
        return {row.rank: "" for row in layout.rows}
    drives_several = lane.drives_all_gpus or lane.gpus_per_rank > 1
    if drives_several or lane.ranks_share_gpus or layout.world_size > len(devices):
        return of_rank
    return {
        row.rank: ",".join(of_rank[rank] for rank in layout.ranks_on(row.node))
        for row in layout.rows
    }


def device_of(local_rank: int, lane: Lane, visible: str) -> torch.device:
    """The device of a rank whose CUDA_VISIBLE_DEVICES is ``visible``."""
    if lane.device_type == "cpu":
        return torch.device("cpu")
    if lane.gpus_per_rank > 1:
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank % len(visible.split(",")))


# Remembers which ranks on GPUs have never started, so that a run can give them up.
#
# If this torch cannot run on this GPU or with this driver, the ranks of a lane never start, and
# every case would find that out again, slowly.


class FailedStarts:
    """The starts of this process: which lanes and layouts have started, and which only failed."""

    def __init__(self) -> None:
        self._started: set[tuple[str, str]] = set()
        self._failed: dict[tuple[str, str], str] = {}

    @contextmanager
    def noted(self, lane: Lane, layout: Layout) -> Iterator[None]:
        """Note whether ranks on GPUs start inside the block.

        Raises CannotRunHere instead of running the block if the run gives up lanes, and these ranks
        have failed to start before and have never started.
        """
        if lane.device_type != "cuda":
            yield
            return
        what = lane.name, layout.name
        reason = self.why_given_up(lane, layout)
        if reason and settings.current().give_up_lanes:
            raise CannotRunHere("backend", lane.name, f"another one: {reason}", *what, reason)
        try:
            yield
        except RankFailed as error:
            if what not in self._started:
                self._failed.setdefault(what, str(error).partition("\n")[0])
            raise
        self._started.add(what)
        self._failed.pop(what, None)

    def why_given_up(self, lane: Lane, layout: Layout) -> str:
        """The error with which these ranks failed to start, or "".

        If no ranks of the lane have ever started, it is the first error of any layout.
        """
        if not any(name == lane.name for name, _ in self._started):
            errors = (error for (name, _), error in self._failed.items() if name == lane.name)
            error = next(errors, None)
            return "" if error is None else f"no ranks have ever started on this lane: {error}"
        error = self._failed.get((lane.name, layout.name))
        return "" if error is None else f"ranks on {layout} have failed to start here: {error}"


@lru_cache(maxsize=1)
def failed_starts() -> FailedStarts:
    """The starts of this process."""
    return FailedStarts()


# Counts the GPUs that this process may use.
#
# Torch asks NVML, or AMD's library on ROCm. Where these give no answer, for MIG ids in
# CUDA_VISIBLE_DEVICES or after an update of the driver, it initialises CUDA here. Ranks can use
# CUDA all the same: they are forked from their server, and not from this process.

NO_GPU = ""
"""The value of CUDA_VISIBLE_DEVICES that hides all GPUs from CUDA."""

NO_GPU_OF_HIP = "-1"
"""The same for HIP, which takes an empty variable for one that is not set.

Source: ROCclr, ``Device::init`` in rocclr/device/rocm/rocdevice.cpp.
"""


@dataclass(frozen=True)
class CountedGpus:
    """``names``: the GPUs as CUDA_VISIBLE_DEVICES would name them. ``problem``: why they could not
    be counted; "" if they were.
    """

    names: tuple[str, ...] = ()
    problem: str = ""


def count_gpus() -> CountedGpus:
    """Count the GPUs that this process may use."""
    if torch.version.cuda is None and torch.version.hip is None:
        return CountedGpus()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count()
        except RuntimeError as error:  # the user's variables contradict each other
            return CountedGpus(problem=str(error))
    problem = "; ".join(dict.fromkeys(str(warning.message) for warning in caught))
    visible = _chosen_by_user()
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return CountedGpus(tuple(name.strip() for name in names[:count]), problem)


def variables(visible: str) -> dict[str, str]:
    """The environment variables that let a new process see these GPUs and no others.

    On ROCm HIP_VISIBLE_DEVICES goes before CUDA_VISIBLE_DEVICES. ROCR_VISIBLE_DEVICES keeps the
    user's value: it chooses the GPUs that the numbers in HIP_VISIBLE_DEVICES count.
    """
    if torch.version.hip is None:
        return {"CUDA_VISIBLE_DEVICES": visible or NO_GPU}
    visible = visible or NO_GPU_OF_HIP
    return {"HIP_VISIBLE_DEVICES": visible, "CUDA_VISIBLE_DEVICES": visible}


def _chosen_by_user() -> str | None:
    """The variable in which the user has named GPUs, in the words that ``variables`` takes."""
    cuda = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.hip is None:
        return cuda
    hip = os.environ.get("HIP_VISIBLE_DEVICES")
    # Without HIP_VISIBLE_DEVICES, torch takes all GPUs that ROCR_VISIBLE_DEVICES leaves.
    return hip if hip is not None or "ROCR_VISIBLE_DEVICES" in os.environ else cuda
