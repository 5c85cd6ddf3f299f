"""An explanation as plain data for machines.

Fractions become floats. The factor is also there as exact text.
"""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from typing import Any

from ddp_equivalence.commands.explain.explanation import Explanation


def as_data(explanation: Explanation) -> dict[str, Any]:
    """Everything in the explanation, ready for json; ``factor_exact`` stands beside ``factor``."""
    data: dict[str, Any] = _plain(asdict(explanation))
    del data["render"]
    data["factor_exact"] = str(explanation.factor)
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
