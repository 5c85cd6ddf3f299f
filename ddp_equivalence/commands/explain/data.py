"""An explanation as plain data for machines.

Fractions become floats. The factor is also there as exact text.
"""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from typing import Any

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.starting_point import starting_point


def as_data(explanation: Explanation) -> dict[str, Any]:
    """Everything in the explanation, ready for json; ``factor_exact`` stands beside ``factor``.

    ``unit``: the text calls the gradient of the mean loss times this number g. ``start``: the
    learning rate to start with.
    """
    data: dict[str, Any] = _plain(asdict(explanation))
    del data["render"]
    data["factor_exact"] = str(explanation.factor)
    data["unit"] = explanation.unit
    rates = explanation.learning_rates
    if rates is not None:
        start = float(rates.same_step)
        if rates.scaling != 1:
            start = starting_point(explanation, rates).rate
        data["learning_rates"]["start"] = start
    if explanation.epoch is not None:
        data["epoch"]["steps"] = explanation.epoch.steps
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
