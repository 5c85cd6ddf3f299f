"""An attack on a condition: random set-ups within it, and counter-examples outside."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

Draw = random.Random
Holds = Callable[..., bool]


@dataclass(frozen=True)
class Attack:
    """``draw``: makes the arguments of ``holds`` within the condition. ``outside``: arguments for
    which ``holds`` must be False.
    """

    claims: tuple[str, ...]
    draw: Callable[[Draw], dict[str, Any]]
    holds: Holds
    outside: tuple[dict[str, Any], ...]


def attack(
    *claims: str, draw: Callable[[Draw], dict[str, Any]], outside: Sequence[dict[str, Any]]
) -> Callable[[Holds], Attack]:
    """Make an attack on these claims of the decorated check."""

    def decorate(holds: Holds) -> Attack:
        return Attack(tuple(f"test_{one}" for one in claims), draw, holds, tuple(outside))

    return decorate


def attacks_of(*modules: ModuleType) -> list[Attack]:
    """All attacks in these modules, in the order in which they are written there."""
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, Attack)]


def near(found: Tensor, expected: Tensor, limit: float = 1e-9) -> bool:
    return bool((found - expected).norm() <= limit * expected.norm())
