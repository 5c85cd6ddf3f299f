"""The states of torch's default random generators in one process: the CPU's and its CUDA device's.

Both are one tensor of bytes, as a record keeps them: first those of the CPU, then those of the
device, if the process has used one. A dropout on a GPU draws from the generator of the GPU alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_followed: list[int] = []
"""The number of the device whose generator is followed, once it is known."""

BYTES_OF_CPU = torch.Generator().get_state().numel()


def follow_device(device: torch.device) -> None:
    """From now on, the CUDA device of this process is the one that its model is on: a script may
    never have made it the current one.
    """
    if device.type == "cuda" and device.index is not None:
        _followed[:] = [device.index]


def generator_state() -> Tensor:
    """The states of the default generators now."""
    states = [torch.default_generator.get_state()]
    if (of_device := _of_cuda_device()) is not None:
        states.append(of_device.get_state())
    return torch.cat(states)


def set_generator_state(state: Tensor) -> None:
    """Let the default generators be in these states, from ``generator_state``."""
    torch.default_generator.set_state(state[:BYTES_OF_CPU].clone())
    of_device = _of_cuda_device()
    if of_device is not None and len(state) > BYTES_OF_CPU:
        of_device.set_state(state[BYTES_OF_CPU:].clone())


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator from which this process draws on a device; None if its state is not kept."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _of_cuda_device() if index == _number() else None


def state_for(device: torch.device, state: Tensor) -> Tensor | None:
    """The part of ``generator_state`` that is of this device; None if it has none."""
    if device.type == "cpu":
        return state[:BYTES_OF_CPU].clone()
    return state[BYTES_OF_CPU:].clone() if len(state) > BYTES_OF_CPU else None


def _of_cuda_device() -> torch.Generator | None:
    """None if this process has not used CUDA yet, or if its CUDA is the CPU (``--as-cpu``)."""
    generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return generators[_number()] if generators else None


def _number() -> int:
    return _followed[0] if _followed else torch.cuda.current_device()
