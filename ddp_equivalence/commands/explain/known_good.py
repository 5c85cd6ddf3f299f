"""KnownGood: a batch and learning rate that worked on one device. Checks of counts and choices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ddp_equivalence.case.errors import BadCase

KNOWN_GOOD = re.compile(
    r"\s*(?P<batch>\d{1,30})\s*@\s*(?P<rate>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?)\s*", re.ASCII
)
"""Python itself also reads 1_0 as a number, which is a typing error here."""

LARGEST = 10**12
"""The largest count accepted: a larger one is a typing error."""
SLOWEST, FASTEST = Fraction(1, 10**30), Fraction(10**30)
"""The smallest and the largest learning rate accepted. Others are typing errors, and products of
them may not fit a float."""


@dataclass(frozen=True)
class KnownGood:
    """The effective ``batch`` and ``learning_rate`` that worked on one device.

    ``loss``: the reduction of the loss over that batch. Raises BadCase for a field that cannot be
    right.
    """

    batch: int
    learning_rate: Fraction
    loss: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_count("known_good", self.batch)
        rate = self.learning_rate
        if not isinstance(rate, Fraction) or not SLOWEST <= rate <= FASTEST:
            raise BadCase("known_good", rate, "a learning rate from 1e-30 to 1e30, as a Fraction")
        check_choice("known_loss", self.loss, ("mean", "sum"))

    @classmethod
    def read(cls, text: str, loss: Literal["mean", "sum"] = "mean") -> KnownGood:
        """Read ``BATCH@LR``, such as ``16@0.01``. Raises BadCase for anything else."""
        right = (
            "BATCH@LR with a whole batch from 1 and a learning rate from 1e-30 to 1e30, such as "
            "16@0.01"
        )
        found = KNOWN_GOOD.fullmatch(text)
        if found is None:
            last, _, first = text.partition("@")
            if KNOWN_GOOD.fullmatch(f"{first}@{last}"):
                right = f"the batch first, {first}@{last}"
            raise BadCase("known_good", text, right)
        batch, rate = int(found["batch"]), float(found["rate"])
        if not 1 <= batch <= LARGEST or not 1e-30 <= rate <= 1e30:
            raise BadCase("known_good", text, right)
        return cls(batch, Fraction(found["rate"]), loss)

    @property
    def factor(self) -> Fraction:
        """The gradient of the loss that worked, as a multiple of the gradient of the mean loss."""
        return Fraction(self.batch if self.loss == "sum" else 1)


def check_count(field: str, value: object, most: int = LARGEST) -> None:
    """Raises BadCase unless ``value`` is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        too_large = isinstance(value, int) and value > most
        limit = f" to {most}" if too_large or most < LARGEST else ""
        raise BadCase(field, value, f"a whole number from 1{limit}")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises BadCase unless ``value`` is one of the choices."""
    if value not in choices:
        raise BadCase(field, value, f"one of {', '.join(choices)}")
