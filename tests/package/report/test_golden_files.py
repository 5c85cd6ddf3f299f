"""What is held of a kept report."""

from __future__ import annotations

import pytest

from tests.package.report.golden_files import stable, with_last_digits_of

KEPT = "backward began at 0.70805, not at 1.5217: 0.943182 times, 2.28 of 12.5, error 0.57.\n"


@pytest.mark.parametrize(
    ("old", "new", "is_held"),
    [
        ("0.70805", "0.70806", False),
        ("0.70805", "0.70804", False),
        ("1.5217", "1.522", True),
        ("1.5217", "1.5218", False),
        ("0.943182", "0.943181", False),
        ("0.70805", "0.70807", True),
        ("1.5217", "1.6217", True),
        ("2.28", "2.29", True),
        ("12.5", "12.6", True),
        ("0.57", "0.58", True),
        ("backward", "forward", True),
        (" times", "", True),
        (", error 0.57", "", True),
    ],
)
def test_only_the_last_digit_of_a_long_number_is_not_held(
    old: str, new: str, is_held: bool
) -> None:
    text = KEPT.replace(old, new)
    assert text != KEPT
    assert (with_last_digits_of(KEPT, text) != KEPT) is is_held


@pytest.mark.parametrize("limit", ["5.7e-14", "6e-07", "1.2e-06", "4.5e-10"])
def test_a_limit_that_is_a_multiple_of_rounding_is_not_held(limit: str) -> None:
    assert stable(f"error 0.97, limit {limit}.") == "error 0.97, limit <tiny>."


@pytest.mark.parametrize("number", ["6e-05", "1e-3", "0.0001"])
def test_a_number_that_is_more_than_rounding_is_held(number: str) -> None:
    assert stable(f"error {number}.") == f"error {number}."


def test_errors_relative_to_a_gradient_of_rounding_are_not_held() -> None:
    assert stable("error 8e+13, limit 5.6.") == "error <huge>, limit <any>."
    assert stable("error 12, limit 5.6.") == "error 12, limit 5.6."
