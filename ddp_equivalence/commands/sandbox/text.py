"""What one run of the sandbox prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ddp_equivalence.commands.sandbox.agreement import Agreement
from ddp_equivalence.commands.sandbox.closed_form import ClosedForm
from ddp_equivalence.commands.sandbox.intervals import LEVEL
from ddp_equivalence.commands.sandbox.outcome import Outcome
from ddp_equivalence.commands.sandbox.problem import SAMPLES, Setup
from ddp_equivalence.report.wrapping import plural

REPORT_LINES = 13
"""Of the suite's report that are shown: the verdict and the argument."""


def title(setup: Setup, as_published: bool) -> str:
    """What is run."""
    if setup.ranks == 1:
        batch, where = f"batch {setup.batch_size}", "one process"
    else:
        batch = f"batch {setup.batch_size} x {setup.ranks} = {setup.effective_batch}"
        called = "as published: the bare net is called" if as_published else "the wrapper is called"
        where = f"{setup.ranks} ranks, gloo, CPU, DistributedDataParallel ({called})"
    epochs = f"{setup.n_epochs} {plural(setup.n_epochs, 'epoch')} of {SAMPLES} samples"
    noise = "no noise" if setup.deterministic else f"noise of seed {setup.seed}"
    return (
        f"{where}\n{batch}, lr {setup.lr:g}, {epochs}: {setup.steps} "
        f"{plural(setup.steps, 'step')}; {setup.n_experiments:,} "
        f"{plural(setup.n_experiments, 'experiment')}, {noise}"
    )


def lines(
    setup: Setup, outcome: Outcome, expected: ClosedForm, agreements: Sequence[Agreement]
) -> Iterator[str]:
    """Measured and closed form, and whether they agree."""
    of_w, of_variance, of_deviation = agreements
    head = "" if setup.deterministic else f"{LEVEL:.1%} interval"
    yield f"{'':<28}{'measured':>12}{head:>28}{'closed form':>14}"
    yield _line("w after the run, mean", outcome.w, of_w, ".6f")
    yield _line("variance of all update steps", outcome.variance, of_variance, ".4e")
    if not setup.deterministic:
        yield _line("deviation of w", outcome.deviation, of_deviation, ".4e")
        yield (
            f"an update step is near normal: excess kurtosis {expected.kurtosis:+.4f} "
            "(allowed for in the interval)"
        )
    for why in dict.fromkeys(one.why for one in agreements if one.why):
        yield f"not judged: {why}"


def spread_lines(setup: Setup, outcome: Outcome) -> Iterator[str]:
    """Whether the ranks hold the same weights at the end."""
    if outcome.spread == 0.0:
        yield f"all {setup.ranks} ranks hold the same weights at the end, bit for bit"
        if setup.deterministic:
            yield "  as without noise they do in any case: all see the same examples"
        return
    apart = float((outcome.spreads > 0).mean())
    typical = math.sqrt(float(outcome.weights.var(axis=0, ddof=1).mean()))
    yield (
        f"the ranks hold DIFFERENT weights at the end, in {apart:.1%} of the experiments: up to "
        f"{outcome.spread:.2e} apart"
    )
    yield (
        f"  standard deviation over ranks {typical:.2e}; the mean moved by "
        f"{abs(outcome.w - 1):.2e}, which it hides in"
    )


def figure(value: float, form: str) -> str:
    """The number, a variance of rounding alone as 0."""
    return "0" if abs(value) < 1e-24 else format(value, form)


def _line(what: str, measured: float, one: Agreement, form: str) -> str:
    verdict = {True: "agree", False: "DO NOT AGREE", None: "not judged"}[one.holds]
    interval = "" if one.low == one.high else f"{format(one.low, form)} .. {format(one.high, form)}"
    closed = figure(one.value, form)
    return f"{what:<28}{figure(measured, form):>12}{interval:>28}{closed:>14}   {verdict}"
