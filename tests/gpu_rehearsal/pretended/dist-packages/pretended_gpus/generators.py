"""The random number generators of the devices.

CUDA draws other numbers than the CPU for the same seed. Here each device has a generator of the
CPU's kind, which starts from another seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pretended_gpus import runtime, settings

OTHER_NUMBERS = 0xC0DA
"""Turns a seed into that of the generator which stands for CUDA's."""

FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("scaled_dot_product_attention", "rrelu", "gumbel_softmax"),
)
"""The functions of torch.nn.functional that draw random numbers."""


class OfGpu(torch.Generator):
    """A generator of the CPU's kind, which draws other numbers than the CPU's for the same seed."""

    def manual_seed(self, seed: int) -> OfGpu:
        super().manual_seed((int(seed) % 2**63) ^ _other())
        return self

    def initial_seed(self) -> int:
        return super().initial_seed() ^ _other()


def _other() -> int:
    return OTHER_NUMBERS if settings.other_masks() else 0


_one_thread = RLock()
_generators: list[OfGpu] = []
_seed_of_all: list[int] = []
"""The seed that was set before CUDA was initialised."""


def start() -> None:
    """Make the generators of the visible devices."""
    seed = _seed_of_all[-1] if _seed_of_all else torch.initial_seed()
    _generators[:] = [OfGpu().manual_seed(seed) for _ in runtime.gpus()]
    cuda: Any = torch.cuda
    cuda.default_generators = tuple(_generators)


def manual_seed(seed: int) -> None:
    """As torch.cuda.manual_seed: only the current device."""
    if runtime.is_initialised():
        of().manual_seed(seed)
    else:
        _seed_of_all[:] = [seed]


def manual_seed_all(seed: int) -> None:
    _seed_of_all[:] = [seed]
    if runtime.is_initialised():
        for generator in _generators:
            generator.manual_seed(seed)


def of(device: Any = None) -> torch.Generator:
    """The generator of a device."""
    runtime.initialise()
    return _generators[runtime.index_of(device)]


@contextmanager
def drawing_on(index: int) -> Iterator[None]:
    """Inside the block torch's default generator continues that of the device."""
    generator = of(index)
    with _one_thread:  # the replicas of nn.DataParallel run in threads
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(host)


def on_device() -> bool:
    """True if this thread computes on a GPU: it is a rank's, and the rank has initialised CUDA."""
    return settings.other_masks() and settings.on_rank() and runtime.is_initialised()


def _drawing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def drawn(*arguments: Any, **keywords: Any) -> Tensor:
        if not on_device():
            return function(*arguments, **keywords)
        with drawing_on(runtime.current()):
            return function(*arguments, **keywords)

    return drawn


def install() -> None:
    """Replace the generators of torch.cuda, and the functions that draw from them."""
    cuda: Any = torch.cuda
    cuda.manual_seed, cuda.manual_seed_all = manual_seed, manual_seed_all
    cuda.initial_seed = lambda: of().initial_seed()
    cuda.get_rng_state = lambda device="cuda": of(device).get_state()
    cuda.set_rng_state = lambda state, device="cuda": of(device).set_state(state)
    cuda.get_rng_state_all = lambda: [one.get_state() for one in _generators]
    if settings.strict():
        return  # tensors know their device
    for name in FUNCTIONS:
        setattr(functional, name, _drawing(getattr(functional, name)))
