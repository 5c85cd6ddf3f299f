"""Watches the buffers of a model: what they hold at a forward pass, and which lines change them.

Running statistics and moving averages are buffers. No gradient reaches them, so each rank changes
its own, unless the step reduces them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.measurement.plain_tensors import plain

MOST_ELEMENTS = 200_000
"""The values of larger buffers are not kept."""

MOST_WATCHED = 64
"""Of a model with more buffers, the lines that change them are not looked for."""

LARGEST = 1_000_000
"""Larger buffers are not compared between the ranks: they are tables that no step changes."""

DIGITS = 16

State = tuple[tuple[str, int, int], ...]


class BufferWatch:
    """Remembers what the buffers of ``model`` were when it was last asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners = [(name, module) for name, module in model.named_modules() if module._buffers]
        self._watches = sum(len(module._buffers) for _, module in self._owners) <= MOST_WATCHED
        self._state = self._now()
        self._digest = ""
        self._values: Mapping[str, Tensor] = {}

    def changed(self) -> tuple[str, ...]:
        """The buffers that have another version, or were replaced, since the last call."""
        if not self._owners or not self._watches:
            return ()
        now = self._now()
        if now == self._state:
            return ()
        before, self._state = set(self._state), now
        return tuple(entry[0] for entry in now if entry not in before)

    def values(self) -> Mapping[str, Tensor]:
        """Copies of what the buffers hold, the same ones as before if nothing has changed."""
        buffers = dict(self._model.named_buffers())
        if not buffers or sum(one.numel() for one in buffers.values()) > MOST_ELEMENTS:
            return {}
        try:
            now = digest({name: plain(one) for name, one in buffers.items()})
            if now != self._digest:
                self._values = {
                    name: plain(one).detach().cpu().clone() for name, one in buffers.items()
                }
                self._digest = now
        except Exception:  # a compiler or a transform of torch.func holds them
            return {}
        return self._values

    def _now(self) -> State:
        return tuple(
            (f"{name}.{key}" if name else key, id(one), one._version)
            for name, module in self._owners
            for key, one in module._buffers.items()
            if one is not None
        )


def digests_of_buffers(model: nn.Module) -> dict[str, str]:
    """Buffer -> a digest of what it holds; without large ones, and those that hold no values."""
    found = {}
    for name, one in model.named_buffers():
        if one.numel() <= LARGEST:
            try:
                with torch.no_grad():
                    found[name] = digest({name: plain(one)})[:DIGITS]
            except Exception:  # it is on no device, or sharded
                continue
    return found
