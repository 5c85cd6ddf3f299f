"""The closed form: mean and variance of the update steps, and the weight that they lead to.

The gradient of one sample is ``g = sign(u) x`` with ``x = 1 + N(0, 1)``, ``y = N(0, 1)`` and
``u = w x - y``. Given x, ``E sign(u) = 2 Phi(w x) - 1 =: h(x)``, so ``E sign(u) x^k = E x^k h(x)``.
Stein's identity ``E (x - 1) f(x) = E f'(x)`` reduces k step by step to 0. All of this is exact for
a given w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, pvariance

from ddp_equivalence.commands.sandbox.problem import Problem

NORMAL = NormalDist()


@dataclass(frozen=True)
class ClosedForm:
    """The figures that a problem must give.

    ``path``: the mean weight before the first step and after each. ``deviation``: the standard
    deviation of the weight at the end. ``variance``: the variance of all update steps, pooled.
    ``kurtosis``: the kurtosis of an update step, in excess of the normal distribution's.
    ``curvature``: how far the second-order terms have moved the mean weight; the neglected
    third-order terms are smaller. ``carried``: the largest share that the weight's own spread has
    in the variance of any step.
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
class GradientMoments:
    """Moments of the gradient of one noisy sample at a weight w.

    ``mean`` is the mean; ``slope`` and ``bend`` are its first and second derivative by w.
    ``variance`` is 2 - mean^2, because ``g^2 = x^2``. ``kurtosis`` is in excess of the normal
    distribution's.
    """

    mean: float
    slope: float
    bend: float
    variance: float
    kurtosis: float


def gradient(w: float) -> GradientMoments:
    """The moments of the gradient of one sample at weight ``w``."""
    s = math.sqrt(1 + w * w)  # the standard deviation of u, whose mean is w
    a = w / s
    density = NORMAL.pdf(a)
    of_sign = 2 * NORMAL.cdf(a) - 1
    # E x^k h'(x) = 2 a density E z^k, where z is normal with mean and variance 1 / (1 + w^2):
    z = 1 / (1 + w * w)
    j0, j1, j2 = (2 * a * density * moment for moment in (1.0, z, z * z + z))
    mean = of_sign + j0
    second = mean + of_sign + j1  # E sign(u) x^2
    third = second + 2 * mean + j2
    variance = 2 - mean**2
    fourth = 10 - 4 * mean * third + 12 * mean**2 - 3 * mean**4  # E x^4 = 10, E x^2 = 2
    return GradientMoments(
        mean=mean,
        slope=density * (4 - 2 * a * a) / s**3,
        bend=-density * a * (8 - 2 * a * a) / s**6 - 3 * a * density * (4 - 2 * a * a) / s**4,
        variance=variance,
        kurtosis=fourth / variance**2 - 3,
    )


@lru_cache(maxsize=64)
def closed_form(problem: Problem) -> ClosedForm:
    """Follow mean and variance of the weight over the steps.

    A step subtracts lr times the mean of B gradients from the weight. Given w, that has mean
    ``lr m(w)`` and variance ``lr^2 (2 - m(w)^2) / B``. The weight's own variance V enters to second
    order: ``E m(w) = m + m'' V / 2`` and ``Var m(w) = m'^2 V``. Terms of third order are neglected.
    """
    return _without_noise(problem) if problem.deterministic else _with_noise(problem)


def _without_noise(problem: Problem) -> ClosedForm:
    path, steps = [1.0], []
    for _ in range(problem.steps):
        steps.append(-problem.lr * ((path[-1] > 0) - (path[-1] < 0)))
        path.append(path[-1] + steps[-1])
    of_all = len(steps) * problem.n_experiments
    pooled = pvariance(steps) * of_all / max(1, of_all - 1)
    return ClosedForm(tuple(path), 0.0, pooled, 0.0, 0.0)


def _with_noise(problem: Problem) -> ClosedForm:
    lr, batch = problem.lr, problem.effective_batch
    path, spread, first_order = [1.0], 0.0, 1.0
    means, within, carried = [], [], 0.0
    for _ in range(problem.steps):
        here = gradient(path[-1])
        mean = here.mean + here.bend * spread / 2
        of_mean = here.slope**2 * spread  # the part that comes from the spread of the weight
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
