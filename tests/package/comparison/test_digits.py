"""Rounding errors do not decide what is printed, or what comes first."""

from __future__ import annotations

from math import inf, isnan, nan, nextafter

import pytest

from ddp_equivalence.comparison.digits import in_order, text_of

HALF_WAY = (
    (0.875, ".2g", "0.88"),
    (0.625, ".2g", "0.63"),
    (0.125, ".2f", "0.13"),
    (0.375, ".1e", "3.8e-01"),
    (1 / 64, ".4g", "0.01563"),
    (1 / 1024, ".6g", "0.000976563"),
    (2.5, ".0f", "3"),
    (1e-5 / 8, ".2g", "1.3e-06"),
)


@pytest.mark.parametrize(("value", "digits", "text"), HALF_WAY)
def test_a_number_half_way_is_rounded_up_on_every_processor(
    value: float, digits: str, text: str
) -> None:
    for factor in (1 - 1e-13, 1 - 1e-15, 1, 1 + 1e-15, 1 + 1e-13):
        assert text_of(value * factor, digits) == text
        assert text_of(-value * factor, digits) == f"-{text}"


@pytest.mark.parametrize("value", [0.0, 1.0, 0.74, 0.8749, 123456.0, 1e-300, 1e300, 999999.4])
@pytest.mark.parametrize("digits", [".2f", ".3g", ".6g", ".1e"])
def test_any_other_number_is_printed_as_python_prints_it(value: float, digits: str) -> None:
    assert text_of(value, digits) == format(value, digits)


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_what_is_not_finite_is_printed_as_it_is(value: float) -> None:
    assert text_of(value, ".2g") == format(value, ".2g")
    assert in_order(value) == value or isnan(value)


@pytest.mark.parametrize("value", [1 / 3, 1 / 1024, 0.1, 2**44, 1.5e-14])
def test_numbers_that_rounding_alone_parts_are_equal_in_order(value: float) -> None:
    assert in_order(nextafter(value, inf)) == in_order(value) == in_order(nextafter(value, 0))
    assert in_order(value) < in_order(value * 1.0001)
