"""Sorts what was done to gradients: by hooks in a backward pass, and by one line after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ddp_equivalence.measurement.calls import Call, CodeLine, GradientChange
from ddp_equivalence.measurement.gradient_watch import GradientWatch, factor_between


def changed_by_hooks(
    gradients: GradientWatch, own: Mapping[str, Tensor], seen: Sequence[Call] = ()
) -> Iterator[GradientChange]:
    """What hooks have done to gradients that backward computed and nobody reduced.

    ``seen``: the calls during this backward; what a line was seen to do is left out.
    """
    known = {name for one in seen if one.change is not None for name in one.change.names}
    changed: dict[float | None, list[str]] = {}
    for name, gradient in own.items():
        if name in known:
            continue
        before, now = gradients.value_before(name), gradients.value_now(name)
        if now is None or now.shape != gradient.shape:
            continue
        added = now if before is None else now - before
        if not bool(gradient.any()) and not bool(added.any()):
            continue
        factor = factor_between(gradient, added)
        if factor is None or abs(factor - 1) > 1e-3:
            changed.setdefault(factor, []).append(name)
    for factor, names in changed.items():
        yield GradientChange(tuple(names), factor)


def merged(last: Call | None, line: CodeLine | None, change: GradientChange) -> bool:
    """True if the last call is a change that the same line has made, to other parameters."""
    if last is None or last.change is None or last.line != line:
        return False
    known = last.change
    return (known.factor, known.cleared, known.exact) == (
        change.factor,
        change.cleared,
        change.exact,
    ) and not set(known.names) & set(change.names)
