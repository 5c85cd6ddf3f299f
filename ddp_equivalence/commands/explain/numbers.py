"""Numbers in the form in which people read and paste them."""

from __future__ import annotations

from fractions import Fraction


def number(value: Fraction | float) -> str:
    """Exact where six significant digits are enough, else rounded to four: 12, 0.01, 0.02828."""
    exact = f"{float(value):.6g}"
    if isinstance(value, Fraction) and Fraction(exact) == value:
        return _plain(exact)
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value)
    return _plain(f"{float(value):.4g}")


def _plain(text: str) -> str:
    """``1e-05`` as ``1e-5``, ``1e+06`` as ``1000000``; from ``1e15`` on with an exponent."""
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    return str(int(float(text))) if 0 < int(exponent) < 15 else f"{mantissa}e{int(exponent)}"


def times(value: Fraction | float) -> str:
    """A multiple as text: ``4``, ``3.75``.

    It is a fraction if its decimals do not end or it is below one: ``5/3``, ``1/4``, ``1/4096``.
    """
    exact = isinstance(value, Fraction) and Fraction(number(value)) == value and value >= 1
    if not isinstance(value, Fraction) or exact:
        return number(value)
    return str(value) if value.numerator == 1 or value.denominator <= 1000 else number(value)


def as_many(value: Fraction) -> str:
    """``4 times``, ``1/4 of``."""
    return f"{times(value)} times" if value >= 1 else f"{times(value)} of"


def divided_by(value: Fraction) -> str:
    """``/ 12``, or ``x 16`` for 1/16."""
    return f"/ {times(value)}" if value >= 1 else f"x {times(1 / value)}"


def of_g(factor: Fraction) -> str:
    """``g``, ``12 g``, ``1/4 g``."""
    return "g" if factor == 1 else f"{times(factor)} g"
