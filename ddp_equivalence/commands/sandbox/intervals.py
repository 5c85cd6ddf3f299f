"""Quantiles and intervals of a mean and of a variance, from many update steps."""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL = 0.999
"""Of all intervals here, two-sided."""

Interval = tuple[float, float]


def normal_quantile(level: float = LEVEL) -> float:
    """How many standard deviations a two-sided interval reaches: 3.29 for 99.9 %."""
    return NormalDist().inv_cdf((1 + level) / 2)


def chi_square_quantile(probability: float, degrees: float) -> float:
    """Within 0.1 % from 100 degrees of freedom on.

    Source: Wilson, Hilferty, The distribution of chi-square, PNAS 17, 1931.
    """
    of_cube = 2 / (9 * degrees)
    root = 1 - of_cube + NormalDist().inv_cdf(probability) * math.sqrt(of_cube)
    return degrees * max(0.0, root) ** 3


def f_quantile(probability: float, above: float, below: float) -> float:
    """Of a ratio of two variances with these degrees of freedom, whose logarithm is near normal.

    Within 1 % from 100 degrees of freedom on. The mean and the variance of the logarithm of
    chi-square are digamma and trigamma of half the degrees, here to second order.
    Source: Abramowitz, Stegun, Handbook of Mathematical Functions, 6.3.18 and 6.4.12.
    """
    mean = (1 / below + 1 / (3 * below**2)) - (1 / above + 1 / (3 * above**2))
    deviation = math.sqrt(2 / max(above - 1, 1.0) + 2 / max(below - 1, 1.0))
    return math.exp(mean + NormalDist().inv_cdf(probability) * deviation)


def degrees_of_freedom(count: int, kurtosis: float) -> float:
    """Of the chi-square that a variance of ``count`` values follows.

    Its variance is ``sigma^4 (2 / (count - 1) + kurtosis / count)``, ``kurtosis`` in excess of the
    normal's; the chi-square with as much is taken.
    """
    return 2 / (2 / (count - 1) + kurtosis / count)


def of_mean(mean: float, deviation: float, count: int, level: float = LEVEL) -> Interval:
    """Where the true mean lies, by a sample's mean and standard deviation."""
    half = normal_quantile(level) * deviation / math.sqrt(count)
    return mean - half, mean + half


def of_variance(variance: float, degrees: float, level: float = LEVEL) -> Interval:
    """Where the true variance lies, by a sample's."""
    tail = (1 - level) / 2
    low = variance * degrees / chi_square_quantile(1 - tail, degrees)
    least = chi_square_quantile(tail, degrees)
    return low, variance * degrees / least if least else math.inf


def of_ratio(above: float, below: float, level: float = LEVEL) -> Interval:
    """Where the ratio of two samples' variances lies, if their true variances are the same."""
    tail = (1 - level) / 2
    return f_quantile(tail, above, below), f_quantile(1 - tail, above, below)
