"""Limits: how far from the float64 big batch a gradient may be before the difference is a fault.

One device that computes in the case's precision is off as well, by rounding alone. A data-parallel
gradient may be a small multiple of that error away from the truth. It may always be a few eps away,
since the error of the one device is sometimes small by luck. (TTrace, arXiv 2506.09280,
theorem 5.3, bounds the error the same way.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EPS_MULTIPLES = {torch.float64: 256.0, torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""The least limit, in eps of the dtype. ``benchmarks/rounding.py`` prints how far sharding alone
moves the gradients of the catalogue."""

DEVICE_MULTIPLE = 8.0
"""The limit, as a multiple of the error of one device. The error of sharded training was at most
2.7 times that of one device in float32. In bfloat16 it was up to 9.4 times that, but only where the
error of the one device was small by luck, and there the least limit is larger."""

NARROW_MULTIPLE = 3.0
"""A narrower limit, for gradients of which rounding takes so much that a limit of eight times
proves nothing. If all of them are within it as well, that is a pass."""

ELEMENT_MULTIPLE = 8.0
"""Single elements scatter more than the norm of all elements: the limit allows 8 standard
deviations."""

ZERO = 1e-12
"""A true gradient that is smaller than this, relative to the norm of all gradients together, may be
zero except for the rounding of float64. It is, if rounding alone may move it by its own size."""

ZERO_INSIDE = 64.0
"""``ZERO`` for a model that computes in float32 inside float64, as a number of eps of float32."""

SMALLEST_INSIDE = 1 / 1024
"""Rounding of a part in float32 reaches a gradient if it moves it by at least this many eps of
float32, relative to its norm."""

NEAR = 16.0
"""The error of a right step may be larger than its limit, by up to this factor, if the error of the
one device was small by luck. It is then measured in more runs."""

USELESS = 0.4
"""A relative limit is useless from this size on: it would nearly accept half a gradient, which is
what averaging twice over two ranks leaves."""


@dataclass(frozen=True)
class Noise:
    """How far rounding alone moved one parameter's gradient on one device.

    ``norm``: ||g - truth||, absolute. ``element``: the worst |g_i - truth_i| in units of
    max(|truth_i|, root mean square of truth).
    """

    norm: float = 0.0
    element: float = 0.0


@dataclass(frozen=True)
class Limit:
    """The limit of one parameter, for its gradient as a whole and for each element of it.

    ``absolute`` is the limit on ||measured - truth||; ``relative`` is ``absolute`` / ||truth||;
    ``element`` bounds |measured_i - truth_i| / max(|truth_i|, root mean square of truth). ``floor``
    is the error of one device / ||truth||. ``reason`` says where the limit comes from.
    """

    absolute: float
    relative: float
    element: float
    floor: float
    reason: str
    perhaps_rounding: float = 0.0
    """An absolute error up to this may be rounding, if the error of the one device was small by
    luck."""
    only_rounding: bool = False
    """True if the true gradient is zero except for rounding, as that of a bias before a
    normalisation is. Both its size and its measured noise must show it."""

    @property
    def is_useless(self) -> bool:
        """True if a fault of about the size of the gradient itself would pass."""
        return self.relative >= USELESS and not self.only_rounding


@dataclass(frozen=True)
class Tolerance:
    """Turns dtype and noise into a limit with its reason.

    ``dtype``: the least precise dtype of the case. ``exact``: compare bit for bit.
    ``device_multiple``: the limit, as a multiple of the error of one device. ``whole``: the norm of
    all gradients of the step together. ``all_runs``: the error of one device is that of all runs
    that are ever made. If a true gradient is zero in all of them, because its terms cancel exactly
    on one device, its limit is one eps of ``whole``. ``measured_on``: the device, if not the CPU.
    ``inside``: the dtype in which the model computes a part, if that is less precise than its
    weights.
    """

    dtype: torch.dtype
    exact: bool = False
    device_multiple: float = DEVICE_MULTIPLE
    whole: float = 0.0
    all_runs: bool = False
    measured_on: str = ""
    inside: torch.dtype | None = None

    def limit(
        self, norm: float, noise: Noise, dtype: torch.dtype | None = None, elements: int = 1
    ) -> Limit:
        """The limit for a parameter.

        ``norm``: the norm of its true gradient. ``noise``: its rounding on one device. ``dtype``:
        its own dtype. ``elements``: the number of its elements.
        """
        if self.exact:
            return Limit(0.0, 0.0, 0.0, 0.0, "exact: integer-valued data, bit for bit")
        dtype = dtype or self.dtype
        eps = torch.finfo(dtype).eps
        multiple = EPS_MULTIPLES.get(dtype, 8.0)
        least, measured = multiple * eps * norm, self.device_multiple * noise.norm
        absolute = max(least, measured)
        of_device = f"{self.device_multiple:g} x the error of one device"
        of_device += f" ({self.measured_on})" if self.measured_on else ""
        zero = ZERO * self.whole
        if self.inside is not None and self._reaches(norm, noise, self.inside):
            name, own = (str(one).removeprefix("torch.") for one in (self.inside, dtype))
            of_device += f", computing in {name} inside {own}"
            zero = max(ZERO, ZERO_INSIDE * torch.finfo(self.inside).eps) * self.whole
        only_rounding = norm <= min(absolute, zero)
        if only_rounding and self.all_runs and eps * self.whole > absolute:
            absolute = eps * self.whole
            reason = "zero except for rounding: 1 eps of the norm of all gradients"
        elif only_rounding:
            reason = f"zero except for rounding: {of_device}"
        elif measured > least:
            reason = of_device
        else:
            reason = f"{multiple:g} eps of {str(dtype).removeprefix('torch.')}"
        element = max(
            ELEMENT_MULTIPLE * multiple * eps, self.device_multiple * _finite(noise.element)
        )
        if only_rounding:
            # One element alone may use up the absolute limit. The unit is the root mean square.
            element = max(element, relative_to(absolute, norm) * math.sqrt(elements))
        return Limit(
            absolute=absolute,
            relative=relative_to(absolute, norm),
            element=element,
            floor=relative_to(noise.norm, norm),
            reason=reason,
            perhaps_rounding=NEAR * max(absolute, eps * self.whole if norm <= zero else 0.0),
            only_rounding=only_rounding,
        )

    def _reaches(self, norm: float, noise: Noise, inside: torch.dtype) -> bool:
        """True if the rounding of this dtype inside the model moves a parameter's gradient."""
        return noise.norm > SMALLEST_INSIDE * torch.finfo(inside).eps * norm


def relative_to(value: float, norm: float) -> float:
    """The value divided by the norm. Relative to zero, zero is 0 and all else is infinite."""
    return value / norm if norm > 0 else (0.0 if value == 0 else math.inf)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
