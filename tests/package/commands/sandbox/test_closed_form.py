"""The closed form of the sandbox agrees with integration, published figures and tables."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from ddp_equivalence.commands.sandbox import table
from ddp_equivalence.commands.sandbox.table import ROWS, PublishedRow
from ddp_equivalence.commands.sandbox.training import Problem, closed_form, gradient


def integrated(w: float, power: int) -> float:
    """E sign(w x - y) x^power, by the trapezoidal rule over x."""
    normal, places = NormalDist(), 4000
    width = 20 / places
    return width * math.fsum(
        x**power * (2 * normal.cdf(w * x) - 1) * normal.pdf(x - 1)
        for x in (-9 + width * place for place in range(places + 1))
    )


@pytest.mark.parametrize("w", [1.0, 0.3, -0.7, 0.0])
def test_the_gradient_has_the_moments_that_integration_gives(w: float) -> None:
    found = gradient(w)
    mean, third = integrated(w, 1), integrated(w, 3)
    assert found.mean == pytest.approx(mean, abs=1e-9)
    assert found.variance == pytest.approx(2 - mean**2, abs=1e-9)
    fourth = 10 - 4 * mean * third + 12 * mean**2 - 3 * mean**4
    assert found.kurtosis == pytest.approx(fourth / found.variance**2 - 3, abs=1e-9)


@pytest.mark.parametrize("w", [1.0, 0.3, -0.7])
def test_slope_and_bend_are_the_derivatives_of_the_mean(w: float) -> None:
    off = 1e-5
    above, below = gradient(w + off), gradient(w - off)
    assert gradient(w).slope == pytest.approx((above.mean - below.mean) / (2 * off), abs=1e-8)
    assert gradient(w).bend == pytest.approx((above.slope - below.slope) / (2 * off), abs=1e-8)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.mode}-{row.problem.lr:g}-{row.w}")
def test_the_closed_form_gives_all_published_rows(row: PublishedRow) -> None:
    expected = closed_form(row.problem)
    steps = row.problem.n_experiments * row.problem.steps
    # Both ends of a row without noise are 0.
    error = table.normal_quantile() * math.sqrt(2 / steps) * (not row.problem.deterministic)
    slack = row.rounding + 4 * expected.deviation / math.sqrt(row.problem.n_experiments)
    assert expected.w == pytest.approx(float(row.w), abs=slack)
    assert expected.variance == pytest.approx(float(row.variance), rel=error, abs=1e-24)


def test_a_step_at_the_start_has_the_known_mean_and_variance() -> None:
    one_step = closed_form(Problem(lr=1e-3, batch_size=256))
    assert one_step.w == pytest.approx(1 - 1e-3 * 0.9599, abs=1e-8)
    assert one_step.variance == pytest.approx(1e-6 * 1.0786 / 256, rel=1e-4)


def test_without_noise_the_weight_turns_round_at_zero() -> None:
    expected = closed_form(Problem(lr=0.4, batch_size=64, deterministic=True, n_experiments=1))
    assert expected.path == pytest.approx((1.0, 0.6, 0.2, -0.2, 0.2))
    assert expected.variance == pytest.approx(0.16)  # -0.4 three times and 0.4 once


# Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4, lower and upper tails.
@pytest.mark.parametrize(
    ("level", "lower", "upper"), [(0.998, 61.918, 149.449), (0.9, 77.929, 124.342)]
)
def test_the_interval_of_a_variance_has_the_tabled_quantiles_of_chi_square(
    level: float, lower: float, upper: float
) -> None:
    expected = 2.0 * 100 / upper, 2.0 * 100 / lower
    assert table.interval_of_variance(2.0, 100, level) == pytest.approx(expected, rel=1e-5)


# Source: Abramowitz, Stegun, Handbook of Mathematical Functions, table 26.9.
@pytest.mark.parametrize(("level", "tabled"), [(0.9, 1.35), (0.98, 1.53), (0.998, 1.77)])
def test_the_interval_of_a_ratio_has_the_tabled_quantiles_of_f(level: float, tabled: float) -> None:
    expected = 1 / tabled, tabled
    assert table.of_ratio(120, 120, level) == pytest.approx(expected, rel=4e-3)


def test_heavier_tails_leave_a_variance_fewer_degrees_of_freedom() -> None:
    assert table.degrees_of_freedom(1001, 0.0) == pytest.approx(1000)
    assert table.degrees_of_freedom(1001, 2.0) == pytest.approx(500, rel=1e-2)
