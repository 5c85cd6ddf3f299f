"""The closed form: mean and variance of the update steps, and the weight that they lead to.

The gradient of one sample is ``g = sign(u) x`` with ``x = 1 + N(0, 1)``, ``y = N(0, 1)`` and
``u = w x - y``. Given x, ``E sign(u) = 2 Phi(w x) - 1 =: h(x)``, so ``E sign(u) x^k = E x^k h(x)``,
which Stein's ``E (x - 1) f(x) = E f'(x)`` takes down to k = 0. All of it is exact for a given w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, pvariance

from ddp_equivalence.commands.sandbox.problem import Setup

NORMAL = NormalDist()


@dataclass(frozen=True)
class ClosedForm:
    """What a setup must give.

    ``path``: the mean weight before the first step and after each. ``deviation``: the standard
    deviation of the weight at the end. ``variance``: of all update steps, pooled. ``kurtosis``: of
    an update step, in excess of the normal's. ``curvature``: how far the second order has moved the
    mean weight; what is neglected, the third, is smaller. ``carried``: the share of the variance of
    any step that comes from the weight's own spread, at most.
    """

    path: tuple[float, ...]
    deviation: float
    variance: float
    kurtosis: float
    curvature: float
    carried: float = 0.0

    @property
    def w(self) -> float:
        return self.path[-1]


@dataclass(frozen=True)
class Gradient:
    """Of one sample at weight w, with noise: its mean, that mean's derivatives, and moments.

    ``variance`` is 2 - mean^2 since ``g^2 = x^2``; ``kurtosis`` is in excess of the normal's.
    """

    mean: float
    slope: float
    bend: float
    variance: float
    kurtosis: float


def gradient(w: float) -> Gradient:
    """The gradient of one sample at weight ``w``."""
    s = math.sqrt(1 + w * w)  # the standard deviation of u, whose mean is w
    a = w / s
    density = NORMAL.pdf(a)
    of_sign = 2 * NORMAL.cdf(a) - 1
    # E z^k h'(z) = 2 a density E z^k, where z is normal with this mean and this variance:
    z = 1 / (1 + w * w)
    j0, j1, j2 = (2 * a * density * moment for moment in (1.0, z, z * z + z))
    mean = of_sign + j0
    second = mean + of_sign + j1  # E sign(u) x^2
    third = second + 2 * mean + j2
    variance = 2 - mean**2
    fourth = 10 - 4 * mean * third + 12 * mean**2 - 3 * mean**4  # E x^4 = 10, E x^2 = 2
    return Gradient(
        mean=mean,
        slope=density * (4 - 2 * a * a) / s**3,
        bend=-density * a * (8 - 2 * a * a) / s**6 - 3 * a * density * (4 - 2 * a * a) / s**4,
        variance=variance,
        kurtosis=fourth / variance**2 - 3,
    )


@lru_cache(maxsize=64)
def closed_form(setup: Setup) -> ClosedForm:
    """Follow mean and variance of the weight over the steps.

    A step takes lr times the mean of B gradients off the weight: given w, with mean
    ``lr m(w)`` and variance ``lr^2 (2 - m(w)^2) / B``. The weight's own spread V enters to second
    order: ``E m(w) = m + m'' V / 2``, ``Var m(w) = m'^2 V``; terms of third order in the spread are
    neglected.
    """
    return _without_noise(setup) if setup.deterministic else _with_noise(setup)


def _without_noise(setup: Setup) -> ClosedForm:
    path, steps = [1.0], []
    for _ in range(setup.steps):
        steps.append(-setup.lr * ((path[-1] > 0) - (path[-1] < 0)))
        path.append(path[-1] + steps[-1])
    of_all = len(steps) * setup.n_experiments
    pooled = pvariance(steps) * of_all / max(1, of_all - 1)
    return ClosedForm(tuple(path), 0.0, pooled, 0.0, 0.0)


def _with_noise(setup: Setup) -> ClosedForm:
    lr, batch = setup.lr, setup.effective_batch
    path, spread, first_order = [1.0], 0.0, 1.0
    means, within, carried = [], [], 0.0
    for _ in range(setup.steps):
        here = gradient(path[-1])
        mean = here.mean + here.bend * spread / 2
        of_mean = here.slope**2 * spread  # from where the weight is, not from the samples
        of_samples = (2 - here.mean**2 - of_mean - here.mean * here.bend * spread) / batch
        means.append(-lr * mean)
        within.append(lr**2 * (of_samples + of_mean))
        carried = max(carried, of_mean / (of_mean + of_samples))
        path.append(path[-1] - lr * mean)
        first_order -= lr * gradient(first_order).mean
        spread = spread * (1 - lr * here.slope) ** 2 + lr**2 * of_samples
    return ClosedForm(
        path=tuple(path),
        deviation=math.sqrt(max(0.0, spread)),
        variance=fmean(within) + pvariance(means),
        kurtosis=gradient(1.0).kurtosis / batch,
        curvature=abs(path[-1] - first_order),
        carried=carried,
    )
