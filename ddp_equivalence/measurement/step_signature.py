"""Whether a rank can call a step, which it gives three arguments: model, shard and rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable

RIGHT = "a function (model, shard, rank)"


def why_not_a_step(step: Callable[..., object]) -> str:
    """What the step should be, if it cannot be called as a step; "" if it can, or nobody knows."""
    if inspect.iscoroutinefunction(step):
        return f"{RIGHT}: a plain function; this one is a coroutine, which nobody awaits"
    if inspect.isgeneratorfunction(step):
        return f"{RIGHT}: a plain function; this one is a generator, whose body would never run"
    if hasattr(step, "__signature__"):
        return ""  # it says what its author likes
    try:
        # A decorator may give the function that it wraps more arguments than it takes itself.
        signature = inspect.signature(step, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None, None, None)
    except TypeError:
        names = signature.replace(
            parameters=[
                one.replace(annotation=inspect.Parameter.empty)
                for one in signature.parameters.values()
            ],
            return_annotation=inspect.Signature.empty,
        )
        return f"{RIGHT}; this one takes {names}"
    return ""
