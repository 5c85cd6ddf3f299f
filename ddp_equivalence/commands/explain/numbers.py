"""Numbers in the form in which people read and paste them."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction


def number(value: Fraction | float) -> str:
    """The number as text, such as 12, 0.01 or 0.02828.

    A Fraction is exact if six significant digits are enough for that, or if it is whole. Every
    other number is rounded to four significant digits.
    """
    exact = f"{float(value):.6g}"
    if isinstance(value, Fraction) and Fraction(exact) == value:
        return _plain(exact)
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value)
    return _plain(f"{float(value):.4g}")


def beta(value: Fraction) -> str:
    """A beta of Adam, such as 0.9999375: what counts of it is its distance from 1.

    That is rounded to four significant digits, so that no beta below 1 becomes 1.
    """
    distance = Decimal(number(1 - value))
    return f"{(1 - distance).normalize():f}"


def _plain(text: str) -> str:
    """The text of a number with a shorter exponent, or with none if the number is below 1e15.

    ``1e-05`` becomes ``1e-5``, and ``1e+06`` becomes ``1000000``.
    """
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    return str(int(float(text))) if 0 < int(exponent) < 15 else f"{mantissa}e{int(exponent)}"


def times(value: Fraction | float) -> str:
    """A multiple as text, such as ``4`` or ``3.75``.

    A multiple below 1 or with endless decimals becomes a fraction: ``5/3``, ``1/4``, ``1/4096``.
    """
    exact = isinstance(value, Fraction) and Fraction(number(value)) == value and value >= 1
    if not isinstance(value, Fraction) or exact:
        return number(value)
    return str(value) if value.numerator == 1 or value.denominator <= 1000 else number(value)


def as_many(value: Fraction) -> str:
    """How many times as many, as text: ``4 times`` or ``1/4 of``."""
    return f"{times(value)} times" if value >= 1 else f"{times(value)} of"


def divided_by(value: Fraction) -> str:
    """A division by ``value`` as text: ``/ 12`` for 12, ``x 16`` for 1/16."""
    return f"/ {times(value)}" if value >= 1 else f"x {times(1 / value)}"


def of_g(factor: Fraction) -> str:
    """A multiple of g as text: ``g``, ``12 g``, ``1/4 g``."""
    return "g" if factor == 1 else f"{times(factor)} g"
