"""Notices the lines of the user's code under which random numbers are drawn, whatever draws them.

The states of the generators are compared after each line. Reading the whole state of a generator of
torch on the CPU takes 1 us; those of Python and numpy take longer, and are read only after lines
that name something random.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ddp_equivalence.measurement.calls import CodeLine

MOST_DRAWS = 200
"""So many lines are remembered."""

HEAD = 32
TAIL = 5_000
"""The bytes in between hold the numbers that are drawn next, and change only with these."""

SETTING = ("seed", "rng_state", "set_state", "setstate", "fork_rng")
"""Lines with these words set a generator, and draw nothing."""

State = tuple[object, ...]


class DrawWatch:
    """``note(line, what)`` is told of a line under which ``what`` drew: "torch" (on the CPU),
    "cuda", "numpy" or "random". Each line is told of once in each step.
    """

    def __init__(self, note: Callable[[CodeLine, str], object]) -> None:
        self._note = note
        self._told: set[object] = set()
        self._line: CodeLine | None = None
        self._torch = _state_of_torch()
        self._cuda = _state_on_cuda()
        self._others: tuple[State, State] | None = None

    def begin_step(self) -> None:
        """A step begins, and its lines are told of again."""
        self._told.clear()
        self._line = None

    def next_line(self, line: CodeLine | None) -> None:
        """This line runs from now on. Whatever was drawn before was drawn by the last one."""
        torch_now, cuda_now = _state_of_torch(), _state_on_cuda()
        if torch_now != self._torch:
            self._torch = torch_now
            self._tell("torch")
        if cuda_now != self._cuda:
            self._cuda = cuda_now
            self._tell("cuda")
        if self._others is not None:
            for before, now, what in zip(
                self._others, _states_of_others(), ("random", "numpy"), strict=True
            ):
                if before != now:
                    self._tell(what)
        self._line = line
        self._others = _states_of_others() if line is not None and _names(line) else None

    def _tell(self, what: str) -> None:
        line = self._line
        key = line, what
        if line is None or key in self._told or len(self._told) >= MOST_DRAWS or _sets(line):
            return
        self._told.add(key)
        self._note(line, what)


def _state_of_torch() -> bytes:
    state = torch.default_generator.get_state().numpy()
    return bytes(state[:HEAD].tobytes() + state[TAIL:].tobytes())


def _state_on_cuda() -> tuple[int, int] | None:
    if not torch.cuda.is_initialized():
        return None
    device, generators = torch.cuda.current_device(), torch.cuda.default_generators
    if device >= len(generators) or generators[device].device.type != "cuda":
        return None  # the GPUs are pretended
    return generators[device].initial_seed(), generators[device].get_offset()


def _states_of_others() -> tuple[State, State]:
    state: Any = np.random.get_state()
    return (random.getstate(),), (np.asarray(state[1]).tobytes(), *state[2:])


@lru_cache(maxsize=4096)
def _text_of(file: str, number: int) -> str:
    return linecache.getline(file, number)


def _names(line: CodeLine) -> bool:
    return "random" in _text_of(line.file, line.number)


def _sets(line: CodeLine) -> bool:
    text = _text_of(line.file, line.number)
    return any(word in text for word in SETTING)
