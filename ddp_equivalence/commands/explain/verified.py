"""What ranks found about each prediction, as data and as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import isclose, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from ddp_equivalence.commands.explain.explanation import LearningRates, Setup
from ddp_equivalence.report.text import plural, wrapped

VerificationOutcome = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True)
class ComparedPrediction:
    """One prediction and what was measured.

    ``what``: the name of what is predicted. ``why``: the reason if the prediction could not be
    judged.
    """

    what: str
    predicted: str
    measured: str
    outcome: VerificationOutcome
    why: str = ""


@dataclass(frozen=True)
class Verification:
    """What ranks found.

    ``setup``: the setup that they ran. ``lane``: the name of the backend on a kind of device.
    ``scaled``: how that setup differs from the explained one. ``not_run``: the parts of the
    explanation that were not verified.
    """

    setup: Setup
    lane: str
    scaled: tuple[str, ...]
    comparisons: tuple[ComparedPrediction, ...]
    not_run: tuple[str, ...] = ()

    @property
    def outcome(self) -> VerificationOutcome:
        """The worst outcome of any prediction; "unknown" if there is no prediction."""
        outcomes = {prediction.outcome for prediction in self.comparisons}
        for outcome in ("differs", "unknown"):
            if outcome in outcomes:
                return outcome
        return "agrees" if outcomes else "unknown"

    def as_data(self) -> dict[str, Any]:
        """The verification, ready for json."""
        comparisons = [asdict(prediction) for prediction in self.comparisons]
        ran = {name: getattr(self.setup, name) for name in ("nodes", "ranks_per_node", "batch")}
        ran["accumulation"] = self.setup.accumulation
        return {
            "outcome": self.outcome,
            "lane": self.lane,
            "ran": ran,
            "scaled": list(self.scaled),
            "comparisons": comparisons,
            "not_run": list(self.not_run),
        }

    def __str__(self) -> str:
        verb = {"agrees": "it agrees", "differs": "IT DIFFERS", "unknown": "not judged"}
        ranks = self.setup.processes
        where = f"{ranks} {plural(ranks, 'process', 'processes')} ({self.lane})"
        text = f"Verified on {where}: {verb[self.outcome]}."
        if self.scaled:
            text += f" Scaled down: {'; '.join(self.scaled)}."
        if self.setup.replicas > 1:
            text += " DataParallel's replicas are emulated in their process."
        lines = wrapped(text, "  ", "  ")
        for prediction in self.comparisons:
            sentence = (
                f"{prediction.what}: predicted {prediction.predicted}; measured "
                f"{prediction.measured}. {prediction.why}"
            )
            lines += wrapped(sentence.strip(), "    ", "    ")
        if self.not_run:
            lines += wrapped(f"Not run: {'; '.join(self.not_run)}.", "    ", "    ")
        return "\n".join(lines) + "\n"


# Train a stand-in with the learning rates for another batch: one weight, several thousand times.
#
# The gradient of a batch is ``mean`` plus normal noise, whose standard deviation is 1 at the
# known batch and falls with the root of the batch. All weights begin at 0, and read as many
# examples with both batches. With SGD the mean gradient falls by ``slope`` times the weight's
# way.

WEIGHTS = 4000
FEWEST_STEPS = 400
LARGEST_RATIO = 64
"""The largest ratio of the two batches: the smaller one takes so many steps for each of the other.
"""
RATE = 1e-3
"""The learning rate with the known batch. Others only scale the stand-in's way."""
MOSTLY_NOISE, MOSTLY_GRADIENT = 0.02, 50.0
"""Mean gradients: far below and far above the noise of a batch."""

OF_LONG_WAYS = 0.02
"""Up to what a long way, or a variance over all updates, may differ: its own error is below 0.5 %,
and the gradient changes by less than 1 % within the small steps that one large step replaces."""
OF_SPREADS = 0.05
"""The same of the spread of the weights: the error of each of the two is 1 / sqrt(2 x WEIGHTS)."""
OF_NOISY_WAYS = 0.2
"""The same of a way that is mostly noise. Its own error is 2 %; Adam's beginning, in which its
means are still made of few gradients, makes up to 10 %."""

MakeOptimizer = Callable[[torch.nn.Parameter], torch.optim.Optimizer]


@dataclass(frozen=True)
class Course:
    """``way``: the mean weight at the end; ``spread``: its standard deviation over all weights.
    ``step_variance``: the variance of a single update.
    """

    way: float
    spread: float
    step_variance: float


def can_train(scaling: Fraction) -> bool:
    """True if the stand-in trains with batches of this ratio."""
    return scaling != 1 and Fraction(1, LARGEST_RATIO) <= scaling <= LARGEST_RATIO


def trained_stand_ins(setup: Setup, rates: LearningRates) -> list[ComparedPrediction]:
    """What the linear and the square-root rate keep, as the explanation says it, on a stand-in."""
    return _with_adam(setup, rates) if setup.is_adam else _with_sgd(rates)


def _with_sgd(rates: LearningRates) -> list[ComparedPrediction]:
    linear_by, root_by = _factors(rates)

    def sgd(rate: float) -> MakeOptimizer:
        return lambda weights: torch.optim.SGD([weights], lr=rate)

    known = _course(rates.scaling, False, sgd(RATE), 1.0, slope=0.1)
    linear = _course(rates.scaling, True, sgd(RATE * linear_by), 1.0, slope=0.1)
    root = _course(rates.scaling, True, sgd(RATE * root_by), 1.0, slope=0.1)
    return [
        _compared_by_training(
            "linear rate: distance of an epoch", linear.way / known.way, OF_LONG_WAYS
        ),
        _compared_by_training(
            "square-root rate: variance of an update",
            root.step_variance / known.step_variance,
            OF_LONG_WAYS,
        ),
    ]


def _with_adam(setup: Setup, rates: LearningRates) -> list[ComparedPrediction]:
    linear_by, root_by = _factors(rates)
    known_betas = (float(setup.betas[0]), float(setup.betas[1]))

    def adam(rate: float, betas: tuple[float, float] = known_betas) -> MakeOptimizer:
        return lambda weights: torch.optim.Adam([weights], lr=rate, betas=betas, eps=0.0)

    known = _course(rates.scaling, False, adam(RATE), MOSTLY_GRADIENT)
    linear = _course(rates.scaling, True, adam(RATE * linear_by), MOSTLY_GRADIENT)
    what = "linear rate where the gradient is much larger than its noise: distance of an epoch"
    found = [_compared_by_training(what, linear.way / known.way, OF_LONG_WAYS)]
    assert rates.adam is not None
    first, second = map(float, rates.adam.betas)
    known = _course(rates.scaling, False, adam(RATE), MOSTLY_NOISE)
    root = _course(rates.scaling, True, adam(RATE * root_by, (first, second)), MOSTLY_NOISE)
    what = "square-root rate where noise is most of the gradient"
    return [
        *found,
        _compared_by_training(
            f"{what}: spread of the weights", root.spread / known.spread, OF_SPREADS
        ),
        _compared_by_training(f"{what}: distance of an epoch", root.way / known.way, OF_NOISY_WAYS),
    ]


def _factors(rates: LearningRates) -> tuple[float, float]:
    """By what the linear and the square-root rate multiply the one that keeps a step's length."""
    return float(rates.linear / rates.same_step), rates.square_root / float(rates.same_step)


def _course(
    scaling: Fraction, new: bool, optimizer: MakeOptimizer, mean: float, slope: float = 0.0
) -> Course:
    """Train on one epoch with the ``new`` batch, or with the known one."""
    steps = round(FEWEST_STEPS * max(Fraction(1), 1 / scaling if new else scaling))
    noise = sqrt(1 / scaling) if new else 1.0
    generator = torch.Generator().manual_seed(int(new))
    weights = torch.nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.double))
    stepped = optimizer(weights)
    variances: list[Tensor] = []
    for _ in range(steps):
        drawn = torch.randn(WEIGHTS, generator=generator, dtype=torch.double)
        weights.grad = mean + slope * weights.detach() + noise * drawn
        before = weights.detach().clone()
        stepped.step()
        variances.append((weights.detach() - before).var())
    end = weights.detach()
    return Course(float(end.mean()), float(end.std()), float(torch.stack(variances).mean()))


def _compared_by_training(what: str, ratio: float, limit: float) -> ComparedPrediction:
    agrees = isclose(ratio, 1, abs_tol=limit)
    return ComparedPrediction(
        f"stand-in (one weight), {what}, relative to the known batch",
        f"1.000 (up to {limit:.0%})",
        f"{ratio:.3f}",
        "agrees" if agrees else "differs",
    )
