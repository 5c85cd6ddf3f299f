"""What a step had begun and had not waited for when it returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ddp_equivalence.ranks.missed_waits import MissedWait, missed_waits


@dataclass
class Races:
    """What is found of races in the steps of one rank, which computes on ``device``.

    ``missed_waits``: the collectives that were never waited for. ``changed_later``: the names of
    gradients that changed after their step had returned.
    """

    device: torch.device
    missed_waits: list[MissedWait] = field(default_factory=list)
    changed_later: list[str] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The block runs a step."""
        with missed_waits(self.device) as missed:
            yield
        self.missed_waits += missed

    def as_left(
        self, gradients: Mapping[str, Tensor | None], keep: bool
    ) -> Mapping[str, Tensor | None]:
        """The gradients that an optimizer would read as soon as the step has returned.

        On CUDA an optimizer's kernels are put on the current stream, and wait for nothing that
        other streams still do. So the gradients are copied on that stream before the device is
        synchronised, and compared with what they are afterwards. This takes the memory of one more
        copy of them. ``keep``: copy them on the CPU as well, because another step follows.
        """
        if self.device.type != "cuda":
            return _copies(gradients) if keep else gradients
        copies = _copies(gradients)
        torch.cuda.synchronize(self.device)
        with _disable_current_modes():  # a log of the step's operations has no room for these
            self.changed_later += [
                name for name, copy in copies.items() if not _same_bits(copy, gradients[name])
            ]
        return copies


def _copies(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if one is None else one.detach().clone() for name, one in gradients.items()}


def _same_bits(copy: Tensor | None, now: Tensor | None) -> bool:
    if copy is None or now is None:
        return copy is now
    if copy.is_sparse:
        copy, now = copy._values(), now._values()
    same = (copy == now) | ((copy != copy) & (now != now))  # NaN counts as equal to NaN
    return bool(same.all())
