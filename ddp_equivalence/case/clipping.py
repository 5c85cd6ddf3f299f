"""Keeps gradients as they were before torch clipped them.

Whoever clips wants other gradients than those of the loss. So the gradients are compared as they
were before: clipped gradients would hide a wrong factor, and would all look wrong beside those of
the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

FUNCTIONS = (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_)
"""The functions of torch that write to gradients to clip them; ``clip_grad_norm_`` calls the first.

Both are wrapped in ``no_grad``. Source: torch 2.11 and 2.13, torch/nn/utils/clip_grad.py.
"""


@dataclass(frozen=True)
class ClipCall:
    """One call that clips gradients. ``most``: the largest norm, or with ``by_value`` the largest
    element; None if it is no number.
    """

    by_value: bool
    most: float | None

    def __str__(self) -> str:
        what = "each element" if self.by_value else "their norm"
        return what if self.most is None else f"{what} to {self.most:g}"

    def again(self, parameters: list[nn.Parameter]) -> None:
        """Clip the gradients of these parameters as the call did."""
        assert self.most is not None
        clip = clip_grad.clip_grad_value_ if self.by_value else clip_grad.clip_grad_norm_
        clip(parameters, self.most)


class Clipping:
    """``calls``: all calls inside ``watched`` that clipped gradients. ``last_count``: the number of
    gradients that the last one clipped.
    """

    def __init__(self) -> None:
        self.calls: list[ClipCall] = []
        self.last_count = 0
        self._clipped: list[dict[int, _Clipped]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the gradients inside the block, whenever torch clips some."""
        inner = [_inner_function(function) for function in FUNCTIONS]
        before = [cell.cell_contents for cell in inner]
        for cell, clip in zip(inner, before, strict=True):
            cell.cell_contents = partial(self._clip, clip)
        try:
            yield
        finally:
            for cell, clip in zip(inner, before, strict=True):
                cell.cell_contents = clip

    def forget(self) -> None:
        """What was clipped until now does not count any more: an optimizer has used it."""
        self._clipped.clear()

    def before(self, gradients: Iterable[Tensor | None]) -> Mapping[int, Tensor]:
        """``id`` of a gradient -> the same before it was clipped.

        Empty unless one call alone has clipped all of ``gradients``, and nothing was written to
        them since: only then did it clip what an optimizer gets.
        """
        if len(self._clipped) != 1:
            return {}
        (clipped,) = self._clipped
        found = {}
        for one in gradients:
            if one is None:
                continue
            kept = clipped.get(id(one))
            if kept is None or not kept.is_as_it_was_left:
                return {}
            found[id(one)] = kept.before
        return found

    def _clip(self, clip: Callable[..., Any], parameters: Any, *rest: Any, **named: Any) -> Any:
        """Clip as torch does, and keep what the gradients were before."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before = [(one, None if one.grad is None else one.grad.detach().clone()) for one in given]
        result = clip(given, *rest, **named)
        by_value = clip.__name__ == clip_grad.clip_grad_value_.__name__
        most = rest[0] if rest else named.get("clip_value" if by_value else "max_norm")
        self.calls.append(ClipCall(by_value, _number(most)))
        clipped = {
            id(one.grad): _Clipped(one.grad, kept)
            for one, kept in before
            if one.grad is not None and kept is not None
        }
        self._clipped.append(clipped)
        self.last_count = len(clipped)
        return result


def _inner_function(wrapped: Any) -> CellType:
    """Where a function of torch keeps the one that it wraps. Whoever has imported the function, by
    whatever name, calls what stands there.
    """
    cells: tuple[CellType, ...] = wrapped.__closure__
    return next(one for one in cells if callable(one.cell_contents))


class _Clipped:
    """A gradient that was clipped just now, and what it was ``before``."""

    def __init__(self, gradient: Tensor, before: Tensor) -> None:
        self.before = before
        self._gradient = gradient  # kept, so that no other tensor gets its id
        self._left = gradient._version, _norm(gradient)

    @property
    def is_as_it_was_left(self) -> bool:
        """True if nothing was written to the gradient since. GradScaler.unscale_ counts no new
        version, but changes the norm.
        """
        return self._left == (self._gradient._version, _norm(self._gradient))


def _norm(gradient: Tensor) -> float:
    """The norm of what this process holds of a gradient; NaN would not be equal to itself."""
    local: Tensor = getattr(gradient, "_local_tensor", gradient).detach()
    values = local.coalesce().values() if local.is_sparse else local
    return float(torch.nan_to_num(values).norm())


def _number(most: Any) -> float | None:
    try:
        return float(most)
    except (TypeError, ValueError, RuntimeError):
        return None
