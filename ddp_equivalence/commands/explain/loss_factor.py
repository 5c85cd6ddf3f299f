"""LossFactor: what each loss is multiplied by before backward, such as the world size."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ddp_equivalence.case.errors import BadCase

NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
LOSS_FACTOR = re.compile(
    rf"(?P<first>{NUMBER}|world-size)(?:/(?P<divisor>{NUMBER}|world-size))?", re.ASCII
)
RIGHT = "a number above 0, world-size, or one divided by the other, such as 4, 1/64 or world-size/8"
SMALLEST, LARGEST = Fraction(1, 10**12), Fraction(10**12)


@dataclass(frozen=True)
class LossFactor:
    """``number`` x the world size to the power of ``power``, from -1 to 2.

    It is 2 where both the user and the trainer multiply by the world size.

    Raises BadCase for a field that cannot be right.
    """

    number: Fraction = Fraction(1)
    power: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.number, Fraction) or not SMALLEST <= self.number <= LARGEST:
            raise BadCase("loss_times", self.number, "a Fraction from 1e-12 to 1e12")
        if self.power not in range(-1, 3):
            raise BadCase("loss_times", self.power, "a power of the world size from -1 to 2")

    @classmethod
    def read(cls, text: str) -> LossFactor:
        """Read ``4``, ``1/64``, ``world-size`` or ``world-size/8``. Raises BadCase."""
        found = LOSS_FACTOR.fullmatch(text.strip())
        if found is None:
            raise BadCase("loss_times", text, RIGHT)
        number, power = Fraction(1), 0
        for word, sign in ((found["first"], 1), (found["divisor"] or "1", -1)):
            if word == "world-size":
                power += sign
            elif not (value := Fraction(word)):
                raise BadCase("loss_times", text, RIGHT)
            else:
                number *= value**sign
        if not SMALLEST <= number <= LARGEST:
            raise BadCase("loss_times", text, f"{RIGHT}, and from 1e-12 to 1e12")
        return cls(number, power)

    def value(self, world_size: int) -> Fraction:
        """The factor with this many processes."""
        return self.number * Fraction(world_size) ** self.power


UNCHANGED = LossFactor()
"""The factor of a loss that is not multiplied by anything."""
