"""How a report writes factors and counts."""

from __future__ import annotations

from ddp_equivalence.comparison.digits import text_of


def scaling_text(what: str, factor: float) -> str:
    """What multiplying by this number does: ``divides the loss by 4``."""
    if 0 < abs(factor) < 1:
        return f"divides {what} by {text_of(1 / factor, '.6g')}"
    return f"multiplies {what} by {text_of(factor, '.6g')}"


def count_text(count: int, name: str) -> str:
    """A number of things: ``1 gradient``, ``6 gradients``."""
    return f"{count} {name}{'' if count == 1 else 's'}"
