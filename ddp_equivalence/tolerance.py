"""How far from the float64 big batch is rounding, and from where on is it a fault.

One device in the case's precision is wrong too, by rounding alone. A data-parallel gradient may be
a small multiple further from the truth than that, but never less than a few eps, since one device
is sometimes lucky. (TTrace, arXiv 2506.09280, theorem 5.3, bounds the error the same way.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EPS_MULTIPLES = {torch.float64: 256.0, torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""The least limit, in eps of the dtype. What sharding alone does to the catalogue is printed by
``benchmarks/rounding.py``."""

DEVICE_MULTIPLE = 8.0
"""How much further from the truth than one device: sharded over single was at most 2.7 in float32;
9.4 in bfloat16 only where the single device was lucky, which the least limit covers."""

ELEMENT_MULTIPLE = 8.0
"""Single elements scatter more than their norm: 8 standard deviations."""

USELESS = 0.1
"""A relative limit from here on could not tell a fault from rounding."""


@dataclass(frozen=True)
class Noise:
    """What rounding alone did to one parameter's gradient on one device.

    ``norm``: ||g - truth||, absolute. ``element``: the worst |g_i - truth_i| in units of
    max(|truth_i|, root mean square of truth).
    """

    norm: float = 0.0
    element: float = 0.0


@dataclass(frozen=True)
class Limit:
    """The limit of one parameter: relative to its norm, and for each element; with its reason.

    ``absolute`` is the limit on ||measured - truth||; ``relative`` the same over ||truth||;
    ``element`` bounds |measured_i - truth_i| / max(|truth_i|, root mean square of truth).
    """

    absolute: float
    relative: float
    element: float
    floor: float
    reason: str

    @property
    def is_useless(self) -> bool:
        return self.relative >= USELESS


@dataclass(frozen=True)
class Tolerance:
    """From dtype and noise to a limit with its reason."""

    dtype: torch.dtype
    exact: bool = False
    device_multiple: float = DEVICE_MULTIPLE

    def limit(self, norm: float, noise: Noise) -> Limit:
        """The limit for a parameter whose true gradient has this norm."""
        if self.exact:
            return Limit(0.0, 0.0, 0.0, 0.0, "exact: integer-valued data, bit for bit")
        eps = torch.finfo(self.dtype).eps
        multiple = EPS_MULTIPLES.get(self.dtype, 8.0)
        least, measured = multiple * eps * norm, self.device_multiple * noise.norm
        absolute = max(least, measured)
        if measured > least:
            reason = f"{self.device_multiple:g} x the error of one device"
        else:
            reason = f"{multiple:g} eps of {str(self.dtype).removeprefix('torch.')}"
        element = max(
            ELEMENT_MULTIPLE * multiple * eps, self.device_multiple * _finite(noise.element)
        )
        return Limit(
            absolute=absolute,
            relative=_over(absolute, norm),
            element=element,
            floor=_over(noise.norm, norm),
            reason=reason,
        )


def _over(value: float, norm: float) -> float:
    return value / norm if norm > 0 else (0.0 if value == 0 else math.inf)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
