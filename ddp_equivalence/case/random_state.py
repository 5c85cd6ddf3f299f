"""Seed the random number generators of torch, numpy and random, and restore their states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import numpy as np
import torch

from ddp_equivalence.case.case import Case

_nobody_restores: list[bool] = []
"""Not empty inside ``without_restoring_random_state``."""


@contextmanager
def restored_random_state() -> Iterator[None]:
    """After the block, torch, numpy and random have the generator states from before it."""
    torch_state, numpy_state, python_state = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    try:
        with without_restoring_random_state():
            yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def without_restoring_random_state() -> Iterator[None]:
    """Inside the block, ``seeded`` sets seeds and does not restore the states afterwards.

    This saves time where the caller restores the states itself, or no longer needs them: reading
    and setting numpy's state alone takes 0.1 ms each time.
    """
    _nobody_restores.append(True)
    try:
        yield
    finally:
        _nobody_restores.pop()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the block, torch, numpy and random start from ``seed``.

    Their states from before are restored afterwards.
    """
    with nullcontext() if _nobody_restores else restored_random_state():
        # torch.manual_seed would format a stack for every device that is not initialised, which
        # takes 1.4 ms with torch 2.13. So the generators are seeded one by one.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)  # replicas of nn.DataParallel draw on other devices
        np.random.seed(seed % 2**32)
        random.seed(seed)
        if not _noticed:
            yield
            return
        before = _states()
        yield
        _noticed[-1].append(_states() != before)


_noticed: list[list[bool]] = []
"""One list for each block of ``draws_noticed``."""


@contextmanager
def draws_noticed() -> Iterator[list[bool]]:
    """Inside the block, each block of ``seeded`` adds to the list whether it has drawn numbers."""
    _noticed.append([])
    try:
        yield _noticed[-1]
    finally:
        _noticed.pop()


def _states() -> tuple[bytes, ...]:
    _, numbers, *position = np.random.get_state()
    others = repr((position, random.getstate())).encode()
    return torch.get_rng_state().numpy().tobytes(), np.asarray(numbers).tobytes(), others


def seed_in_use() -> int:
    """The seed from which torch draws in this process: on its GPU, if it has begun to use one."""
    if torch.cuda.is_initialized():
        return torch.cuda.default_generators[torch.cuda.current_device()].initial_seed()
    return torch.initial_seed()


def batch_seed(seed: int) -> int:
    """The seed that is set in torch, numpy and random before a case's batch is built.

    It is the case's seed plus 2^31. Model, batch builder and generator start from three different
    seeds, also modulo 2^32, which is all that numpy and torch's generator on the CPU use of a seed.
    From one seed, a weight and the data that are drawn with the same shape would be equal.
    """
    return seed + 2**31


def generator_seed(seed: int) -> int:
    """The seed of the generator that a batch builder is given: the case's seed plus 2^30."""
    return seed + 2**30


Seeds = Literal["apart", "alike"]
"""Whether each rank draws random numbers of its own, or all draw those of the reference."""

SEEDS = ("apart", "alike")

APART = 2**20
"""The distance between the seeds of two ranks that are seeded apart. No check has as many steps."""


def step_seed(case: Case, step: int, rank: int = 0, seeds: Seeds = "alike") -> int:
    """The seed that the reference sets before the forward pass of ``step``, and a rank as well."""
    return case.seed + 1 + step + (rank * APART if seeds == "apart" else 0)
