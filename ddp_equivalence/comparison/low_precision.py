"""How far rounding moves a model that computes in a lower precision than its weights have.

Many models compute a part in float32 whatever dtype they are given: a loss of ``logits.float()``, a
normalisation, a softmax. In a check in float64, such a part rounds a billion times as much as the
rest. Nudging weights by one eps of float64 does not show it, because most values then round to the
same float32 as before. So the values that are rounded to the lower precision are nudged themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
"""In which dtype the result of an operation in a low precision is computed again."""


class NudgedInside(TorchDispatchMode):
    """Inside the block, values that were rounded to a dtype below float64 are nudged.

    Each of them moves up or down at random: by one eps of its own dtype, or by as much as it
    differs from the same operation in float64, whichever is more. A result that was not rounded
    stays as it is: a copy, a maximum, a whole number. So comparisons between values still hold.

    ``number``: the number of the random pattern. ``lowest``: the least precise dtype in which a
    value was rounded; None if none was.
    """

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.lowest: torch.dtype | None = None
        self._generator = torch.Generator().manual_seed(number)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because torch would otherwise import its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not any(map(_is_low, _leaves(result))) or not _makes_values(function):
            return result
        try:
            wide = function(*pytree.tree_map(_widened, args), **pytree.tree_map(_widened, kwargs))
        except (RuntimeError, TypeError):  # there is no such operation in float64
            return result
        rounded, spec = pytree.tree_flatten(result)
        exact = pytree.tree_leaves(wide)
        if len(rounded) != len(exact):
            return result
        moved = [self._moved(one, other) for one, other in zip(rounded, exact, strict=True)]
        return pytree.tree_unflatten(moved, spec)

    def _moved(self, rounded: Any, exact: Any) -> Any:
        """The value, or its elements, moved up or down wherever it differs from the exact one."""
        if not _is_low(rounded) or not isinstance(exact, Tensor) or exact.shape != rounded.shape:
            return rounded
        value = rounded.to(exact.dtype)
        off = (value - exact).abs()
        was_rounded = (off > 0) & off.isfinite()
        if not bool(was_rounded.any()):
            return rounded
        eps = torch.finfo(rounded.dtype).eps
        self.lowest = lower(self.lowest, rounded.dtype)
        signs = torch.randint(2, rounded.shape, generator=self._generator).to(rounded.device)
        moved = value + (2 * signs - 1) * torch.maximum(off, eps * value.abs())
        # The value is left alone where moving it would leave the range of its dtype.
        narrow = moved.to(rounded.dtype)
        return torch.where(was_rounded & narrow.isfinite(), narrow, rounded)


def lower(one: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
    """The less precise of two dtypes; None stands for no dtype."""
    given = [dtype for dtype in (one, other) if dtype is not None]
    return max(given, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _leaves(result: Any) -> Iterable[Any]:
    return (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result)


def _is_low(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in WIDE
        and value.layout is torch.strided
        and value.numel() > 0
    )


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE else value
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _makes_values(function: Callable[..., Any]) -> bool:
    """True if an operation returns new values that depend on its arguments alone.

    One that returns a view, writes into its arguments or draws random numbers does not.
    """
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
        return False
    return all(returned.alias_info is None for returned in schema.returns)
