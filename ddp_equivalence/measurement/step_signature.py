"""Whether a rank can call a step, and with what: model, shard and rank; or first model and rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable

RIGHT = "a function (model, shard, rank), or (model, rank) that returns a function of the shard"


def why_not_a_step(step: Callable[..., object]) -> str:
    """What the step should be, if it cannot be called as a step; "" if it can, or nobody knows."""
    if inspect.iscoroutinefunction(step):
        return f"{RIGHT}: a plain function; this one is a coroutine, which nobody awaits"
    if inspect.isgeneratorfunction(step):
        return f"{RIGHT}: a plain function; this one is a generator, whose body would never run"
    if hasattr(step, "__signature__"):
        return ""  # it says what its author likes
    if is_prepared(step):
        return ""
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


def is_prepared(step: object) -> bool:
    """True if the step is made once for all big batches: it takes two arguments, which are called
    ``model`` and ``rank``.
    """
    if isinstance(step, str):
        return False
    try:
        parameters = inspect.signature(step, follow_wrapped=False).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    positional = [one for one in parameters.values() if one.kind in POSITIONAL]
    if [one.name.strip("_") for one in positional[:2]] != ["model", "rank"]:
        return False
    return all(one.default is not inspect.Parameter.empty for one in positional[2:])


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
