"""Confidence intervals of a mean, of a variance, and of the ratio of two variances.

This module needs scipy, which the extra ``sandbox`` installs.
"""

from __future__ import annotations

import math

from scipy import stats

LEVEL = 0.999
"""The confidence level of all intervals here; they are two-sided."""

Interval = tuple[float, float]
"""The lower and the upper end."""


def normal_quantile(level: float = LEVEL) -> float:
    """How many standard deviations a two-sided interval reaches: 3.29 for 99.9 %."""
    return float(stats.norm.ppf((1 + level) / 2))


def beyond(distance: float) -> float:
    """How often a normal number is so many standard deviations or more away, on either side."""
    return float(2 * stats.norm.sf(distance))


def degrees_of_freedom(count: int, kurtosis: float) -> float:
    """The degrees of freedom of the chi-square that the variance of ``count`` values follows.

    ``kurtosis`` is in excess of the normal distribution's. The variance of such a sample variance
    is ``sigma^4 (2 / (count - 1) + kurtosis / count)``; the chi-square distribution with the same
    variance is taken.
    """
    return 2 / (2 / (count - 1) + kurtosis / count)


def of_mean(mean: float, deviation: float, count: int, level: float = LEVEL) -> Interval:
    """The interval of the true mean, from the mean and standard deviation of a sample."""
    half = normal_quantile(level) * deviation / math.sqrt(count)
    return mean - half, mean + half


def of_variance(variance: float, degrees: float, level: float = LEVEL) -> Interval:
    """The interval of the true variance, from the variance of a sample."""
    tail = (1 - level) / 2
    largest, smallest = stats.chi2.ppf((1 - tail, tail), degrees)
    return float(variance * degrees / largest), float(variance * degrees / smallest)


def of_ratio(above: float, below: float, level: float = LEVEL) -> Interval:
    """The interval of the ratio of two sample variances whose true variances are the same.

    ``above`` and ``below``: the degrees of freedom of the two samples.
    """
    tail = (1 - level) / 2
    low, high = stats.f.ppf((tail, 1 - tail), above, below)
    return float(low), float(high)
