"""Numbers with few digits, the same on every processor.

Rounding errors are another matter on every processor, so they must not decide what a report says.
They would wherever the exact number lies half-way between two numbers of so many digits: an error
of 0.875 is computed as 0.87499999999999989 on one processor and as 0.87500000000000011 on another.
"""

from __future__ import annotations

import re
from math import copysign, floor, isfinite, log10

FORMAT = re.compile(r"\.(?P<digits>\d+)(?P<kind>[efg])")

PART_OF_A_DIGIT = 1e-3
"""A number is rounded up if so small a part of its last digit is missing."""

DIGITS = 6
"""Numbers that agree in so many digits are equal, if they are put in an order."""


def text_of(value: float, digits: str) -> str:
    """The number in a format such as ``.2f``, ``.1e`` or ``.4g``; one half-way is rounded up.

    Negative numbers are rounded as positive ones are.
    """
    match = FORMAT.fullmatch(digits)
    assert match is not None, digits
    if value == 0 or not isfinite(value):
        return format(value, digits)
    last = -int(match["digits"])
    if match["kind"] != "f":
        last += floor(log10(abs(value)))
    if match["kind"] == "g":
        last += 1
    return format(value + copysign(PART_OF_A_DIGIT * 10.0**last, value), digits)


def in_order(value: float) -> float:
    """The number without the digits that rounding errors may change, to put numbers in an order."""
    return float(text_of(value, f".{DIGITS}g"))
