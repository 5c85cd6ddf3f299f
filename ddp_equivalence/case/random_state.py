"""Seed the random number generators, and leave their states as they were found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from ddp_equivalence.case.case import Case


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leave the states of torch's, numpy's and random's generators as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with random_numbers_kept_outside():
            yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def random_numbers_kept_outside() -> Iterator[None]:
    """Inside, nobody keeps the generators' states: whoever is outside does."""
    _keeping.append(True)
    try:
        yield
    finally:
        _keeping.pop()


_keeping: list[bool] = []

"""Not empty while somebody keeps them: numpy's alone costs 0.1 ms each time."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside; leave their states outside as they were."""
    with nullcontext() if _keeping else random_numbers_kept():
        # torch.manual_seed formats a stack for every device that is not initialised: 1.4 ms.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def step_seed(case: Case, step: int) -> int:
    """The seed before every forward pass, on every rank and in the reference."""
    return case.seed + 1 + step
