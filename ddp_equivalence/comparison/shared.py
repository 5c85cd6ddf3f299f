"""True gradients in memory that the ranks on this machine can read, so that they compare theirs."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.memory import LARGE, give_back_memory
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.blocks import Block, block_of, of_the_whole
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.gradients import ElementSample, Gradients, dense, gathered
from ddp_equivalence.comparison.sums import Sums, Truth, norm_of

NUMPY = {torch.float64: np.float64, torch.float32: np.float32}

READY = 8
"""The file begins with so many bytes: zero until all is written, then where its table begins."""

NO_ROOM = 1
"""They say this instead if there is no room for the gradients."""

SHORTEST_WAIT, LONGEST_WAIT = 0.001, 0.05
"""Seconds between two looks whether the true gradients are there."""


@dataclass(frozen=True)
class _Table:
    """``places``: gradient -> where it begins in the file, and how many elements it has; None if
    the big batch has none. ``dtype``: of all elements. ``rms``: the root of the mean of its
    squares. ``sample``: the elements of which a copy is kept.
    """

    dtype: torch.dtype
    places: Mapping[GradientKey, tuple[int, int] | None]
    rms: Mapping[GradientKey, float]
    sample: ElementSample[GradientKey]

    def truth(self, key: GradientKey, memory: mmap.mmap) -> Truth | None:
        """The true gradient in this memory."""
        place = self.places.get(key)
        return (
            None if place is None else np.frombuffer(memory, NUMPY[self.dtype], place[1], place[0])
        )


class SharedGradients:
    """A file without a name, which ends with this process. Ranks open it by its ``address``.

    Its pages are memory until the machine needs this for something else. Raises OSError if the disk
    is full.
    """

    def __init__(self) -> None:
        # A handle that is closed before the ranks have read it would take the address with it.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self.address = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        try:
            os.posix_fallocate(self._file.fileno(), 0, READY)
        except OSError:
            self._file.close()
            raise

    def close(self) -> None:
        """Take the address away. Gradients that were put there stay as long as they are used."""
        self._file.close()

    def put(
        self,
        gradients: dict[GradientKey, Tensor | None],
        sample: ElementSample[GradientKey],
        dtype: torch.dtype,
    ) -> None:
        """Move the gradients into the file, one after the other, and let ranks read them.

        The tensors in ``gradients`` are replaced by those in the file. Ranks that compute in
        ``dtype`` are compared with numbers of float32, if that is as precise: they take half the
        memory. If the disk is full, nothing is moved, and the ranks are told so.
        """
        dtype = torch.float64 if dtype is torch.float64 else torch.float32
        places: dict[GradientKey, tuple[int, int] | None] = {}
        end = READY
        for key, one in gradients.items():
            places[key] = None if one is None else (end, one.numel())
            end += 0 if one is None else dtype.itemsize * one.numel()
        rms = dict.fromkeys(places, 0.0)  # which takes as many bytes as the numbers will
        table = pickle.dumps(_Table(dtype, places, rms, sample))
        try:
            os.posix_fallocate(self._file.fileno(), 0, end + len(table))
        except OSError:
            os.pwrite(self._file.fileno(), NO_ROOM.to_bytes(READY, "little"), 0)
            return
        # It may be written to, which torch asks for, and is copied only where that is done.
        memory = mmap.mmap(self._file.fileno(), end + len(table), access=mmap.ACCESS_COPY)
        freed = LARGE  # the model has just gone
        for key, place in places.items():
            one = gradients[key]
            if one is None or place is None or not one.numel():
                continue
            begin, count = place
            exact = dense(one).reshape(-1)
            rms[key] = norm_of(exact.numpy()) / math.sqrt(count)
            flat = exact.to(dtype).numpy()
            _write(self._file.fileno(), flat.data.cast("B"), begin)
            if not one.is_sparse:
                view = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
                gradients[key] = view.view(one.shape)
            freed += dtype.itemsize * count
            del one, exact, flat
            if freed >= LARGE:
                give_back_memory()
                freed = 0
        _write(
            self._file.fileno(), memoryview(pickle.dumps(_Table(dtype, places, rms, sample))), end
        )
        # A call of the system, so that no processor shows this before what was written above.
        os.pwrite(self._file.fileno(), end.to_bytes(READY, "little"), 0)


@dataclass(frozen=True)
class ComparedHere:
    """What a rank says of its gradients: sums for each, and copies of the elements of a sample.

    ``blocks``: where the part lies that it has, for gradients that are sharded. ``numbers``: which
    elements of the sample are in it.
    """

    sums: dict[GradientKey, Sums] = field(default_factory=dict)
    kept: dict[GradientKey, Tensor] = field(default_factory=dict)
    blocks: dict[GradientKey, Block] = field(default_factory=dict)
    numbers: dict[GradientKey, np.ndarray[Any, Any]] = field(default_factory=dict)


def compared_here(address: str, gradients: Gradients) -> ComparedHere | None:
    """Compare these gradients with the true ones at this address, chunk by chunk, on the devices
    where they are. Waits until the true ones are there. None if this process cannot read them, or
    if there is no room for them.

    Of a sharded gradient each rank compares its own block. All ranks must call this for the same
    gradients in the same order: one whose parts are no blocks is gathered, and let go again.
    """
    try:
        with Path(address).open("rb") as file:
            end = _wait_until_ready(file.fileno())
            if end == NO_ROOM:
                return None
            # It may be written to, which torch asks for, and is copied only where that is done.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError:
        return None
    table: _Table = pickle.loads(memory[end:])
    here = ComparedHere()
    for key, one in gradients.items():
        if one is None:
            continue
        truth, block = table.truth(key, memory), block_of(one)
        if truth is None or block is None or block.whole != tuple(one.shape):
            _take_whole(here, table, key, gathered(one), truth)
        else:
            _take_block(here, table, key, dense(one), truth, block)
    return here


def _take_whole(
    here: ComparedHere, table: _Table, key: GradientKey, gradient: Tensor, truth: Truth | None
) -> None:
    sums, kept = Sums(), list[Tensor]()
    rms = table.rms.get(key, 0.0)
    for chunk in chunks({key: gradient}):
        sums.take_chunk(chunk, truth, rms)
        if key in table.sample.sizes:
            kept.append(table.sample.of_chunk(key, chunk.offset, chunk.values).cpu())
    if gradient.numel():
        here.sums[key] = sums.sent()
    if kept:
        here.kept[key] = torch.cat(kept)


def _take_block(
    here: ComparedHere,
    table: _Table,
    key: GradientKey,
    local: Tensor,
    truth: Truth,
    block: Block,
) -> None:
    sums, rms = Sums(), table.rms[key]
    for offset, values, right in block.parts(local, truth):
        sums.take(offset, values, right, rms)
    here.sums[key], here.blocks[key] = sums.sent(), block
    if key in table.sample.sizes and local.numel():
        sampled = range(0, table.sample.sizes[key], table.sample.stride[key])
        here.numbers[key], own = block.places_of(sampled)
        here.kept[key] = local.reshape(-1)[torch.from_numpy(own).to(local.device)].cpu()


def sums_of(here: Mapping[int, ComparedHere], rank: int, key: GradientKey) -> Sums:
    """The sums of a whole gradient on a rank, be it that others have parts of it."""
    block = here[rank].blocks.get(key)
    if block is None:
        return here[rank].sums[key]
    parts = {
        one: (here[one].blocks[key], here[one].sums[key])
        for one in block.holders
        if one in here and key in here[one].blocks
    }
    return of_the_whole(parts)


def kept_of(here: Mapping[int, ComparedHere], rank: int, key: GradientKey, count: int) -> Tensor:
    """The same for the elements of the sample, of which there are ``count``."""
    block = here[rank].blocks.get(key)
    if block is None:
        return here[rank].kept[key]
    found = torch.zeros(count, dtype=torch.float64)
    for one in block.holders:
        if one in here and key in here[one].numbers:
            found[torch.from_numpy(here[one].numbers[key])] = here[one].kept[key].double()
    return found


def _write(file: int, data: memoryview, begin: int) -> None:
    """Write all of it; a call of the system may take less. Writing is faster than copying into a
    map of the file, of which each page would have to be mapped first.
    """
    while data:
        written = os.pwrite(file, data, begin)
        data, begin = data[written:], begin + written


def _wait_until_ready(file: int) -> int:
    wait = SHORTEST_WAIT
    while not (end := int.from_bytes(os.pread(file, READY, 0), "little")):
        time.sleep(wait)  # the process that judges ends ranks that wait in vain
        wait = min(LONGEST_WAIT, 2 * wait)
    return end


@contextlib.contextmanager
def shared_gradients(wanted: bool) -> Iterator[SharedGradients | None]:
    """A file for true gradients; None if none is ``wanted``, or if ranks could not find it."""
    if not wanted or not Path("/proc/self/fd").is_dir():
        yield None
        return
    try:
        shared = SharedGradients()
    except OSError:
        yield None
        return
    try:
        yield shared
    finally:
        shared.close()
