"""Notices what becomes of the gradients of a model while its step runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.measurement.calls import GradientChange
from ddp_equivalence.measurement.plain_tensors import plain

SAME_FACTOR = 1e-3
"""Gradients were multiplied by a number if this much of them, relative to their norm, is not."""

State = tuple[int, int] | None
"""The id and the version of a gradient; None if there is none."""


class GradientWatch:
    """Compares the gradients of a model with what they were when it was last asked.

    ``sample``: the elements of each gradient that are kept for this.
    """

    def __init__(self, model: nn.Module, sample: ElementSample[str]) -> None:
        self._sample = sample
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in sample.sizes and sample.sizes[name] == parameter.numel()
        }
        self._states: dict[str, State] = {}
        self._values: dict[str, Tensor | None] = {}
        self._pending: set[str] = set()
        self.accept()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients that there are now, by parameter."""
        return {
            name: parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that are watched."""
        return self._parameters

    def accept(self) -> None:
        """Take the gradients as they are now for what is known."""
        for name in self._parameters:
            if name not in self._pending:
                self._accept(name)

    def accept_these(self, names: tuple[str, ...], pending: bool = False) -> None:
        """Take these gradients as they are now; if ``pending``, not until this is called again."""
        for name in names:
            if name not in self._parameters:
                continue
            if pending:
                self._pending.add(name)
            else:
                self._pending.discard(name)
                self._accept(name)

    def changes(self, by_value: bool) -> list[GradientChange]:
        """What has changed since the last call, grouped by what was done.

        ``by_value``: compare all values. Otherwise only those gradients are compared whose version
        has changed, which costs much less, and misses what was done through ``.data`` or numpy.
        """
        found: dict[tuple[float | None, bool], list[str]] = {}
        for name, parameter in self._parameters.items():
            if name in self._pending:
                continue
            state = _state(parameter.grad)
            if state == self._states[name] and not by_value:
                continue
            before, now = self._values[name], self._copy(name)
            self._states[name] = state
            self._values[name] = now
            if not _equal(before, now):
                found.setdefault(_done(before, now), []).append(name)
        return [
            GradientChange(tuple(names), factor, cleared)
            for (factor, cleared), names in found.items()
        ]

    def known_value(self, name: str) -> Tensor | None:
        """The sampled elements of a gradient, as last accepted; empty if there was no gradient.

        None if they are not known, as while a collective may still change them.
        """
        if name in self._pending or name not in self._values:
            return None
        value = self._values[name]
        if value is None and self._states[name] is None:
            return torch.empty(0, dtype=torch.float64)
        return value

    def value_before(self, name: str) -> Tensor | None:
        """The sampled elements of a gradient, as last accepted."""
        return self._values.get(name)

    def value_now(self, name: str) -> Tensor | None:
        """The sampled elements of a gradient as it is."""
        return self._copy(name) if name in self._parameters else None

    def state_now(self, name: str) -> State:
        """Changes whenever something writes to a gradient, or puts another one in its place."""
        return _state(self._parameters[name].grad)

    def _accept(self, name: str) -> None:
        state = _state(self._parameters[name].grad)
        self._states[name] = state
        self._values[name] = self._copy(name)

    def _copy(self, name: str) -> Tensor | None:
        gradient = self._parameters[name].grad
        if gradient is None:
            return None
        try:
            return self._sample.of_one(name, plain(gradient.detach()))
        except Exception:  # a sharded gradient has no values of its own
            return None


def _state(gradient: Tensor | None) -> State:
    if gradient is None:
        return None
    try:
        return id(gradient), gradient._version
    except RuntimeError:  # a tensor that was made in inference mode has no version
        return id(gradient), -1


def _equal(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None:
        return _is_nothing(before) and _is_nothing(now)
    same = (before == now) | ((before != before) & (now != now))  # NaN counts as equal to NaN
    return before.shape == now.shape and bool(same.all())


def _is_nothing(value: Tensor | None) -> bool:
    return value is None or not bool(value.any())


def _done(before: Tensor | None, now: Tensor | None) -> tuple[float | None, bool]:
    """By which number a gradient was multiplied, and whether it was cleared."""
    if _is_nothing(now):
        return None, True
    if before is None or now is None or _is_nothing(before) or before.shape != now.shape:
        return None, False
    return factor_between(before, now), False


def change_between(name: str, before: Tensor | None, now: Tensor | None) -> GradientChange | None:
    """What was done to a gradient; None if its values are the same."""
    if _equal(before, now):
        return None
    factor, cleared = _done(before, now)
    return GradientChange((name,), factor, cleared)


def factor_between(before: Tensor, now: Tensor, same: float = SAME_FACTOR) -> float | None:
    """The number that ``now`` is ``before`` times; None if it is no multiple of it.

    ``same``: how much of it, relative to its norm, may be something else.
    """
    square = float(before @ before)
    if not square or not bool(torch.isfinite(now).all()):
        return None
    factor = float(now @ before) / square
    rest = float((now - factor * before).norm())
    return in_order(factor) if rest <= same * float(now.norm()) else None


def matching_segments(
    flat: Tensor, values: Mapping[str, Tensor], same: float = SAME_FACTOR
) -> Iterator[tuple[str, float]]:
    """The tensors that ``flat`` is put together from, one after the other, and their factors.

    Stops where no tensor fits. Shapes: all are flat. A tensor of one element is a multiple of every
    number, so its factor must be 1, or that of the tensor before.
    """
    at, left, last = 0, dict(values), 1.0
    while at < len(flat) and left:
        for name, value in left.items():
            segment = flat[at : at + len(value)]
            factor = factor_between(value, segment, same) if len(segment) == len(value) else None
            if factor and (len(value) > 1 or abs(factor - last) <= same * abs(last)):
                yield name, factor
                at, last = at + len(value), factor
                del left[name]
                break
        else:
            return
