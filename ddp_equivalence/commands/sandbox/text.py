"""What one run of the sandbox prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ddp_equivalence.commands.sandbox.agreement import Agreement
from ddp_equivalence.commands.sandbox.closed_form import ClosedForm
from ddp_equivalence.commands.sandbox.intervals import LEVEL
from ddp_equivalence.commands.sandbox.problem import SAMPLES, Problem
from ddp_equivalence.commands.sandbox.training_result import TrainingResult
from ddp_equivalence.report.wrapping import plural


def title(problem: Problem, as_published: bool) -> str:
    """What is run, in two lines."""
    if problem.ranks == 1:
        batch, where = f"batch {problem.batch_size}", "one process"
    else:
        batch = f"batch {problem.batch_size} x {problem.ranks} = {problem.effective_batch}"
        called = "as published: the bare net is called" if as_published else "the wrapper is called"
        where = f"{problem.ranks} ranks, gloo, CPU, DistributedDataParallel ({called})"
    epochs = f"{problem.n_epochs} {plural(problem.n_epochs, 'epoch')} of {SAMPLES} samples"
    noise = "no noise" if problem.deterministic else f"noise of seed {problem.seed}"
    return (
        f"{where}\n{batch}, lr {problem.lr:g}, {epochs}: {problem.steps} "
        f"{plural(problem.steps, 'step')}; {problem.n_experiments:,} "
        f"{plural(problem.n_experiments, 'experiment')}, {noise}"
    )


def result_lines(
    problem: Problem,
    result: TrainingResult,
    expected: ClosedForm,
    agreements: Sequence[Agreement],
) -> Iterator[str]:
    """The measured figures beside the closed form, and whether they agree."""
    of_w, of_variance, of_deviation = agreements
    head = "" if problem.deterministic else f"{LEVEL:.1%} interval"
    yield f"{'':<28}{'measured':>12}{head:>28}{'closed form':>14}"
    yield _figure_line("w after the run, mean", result.w, of_w, ".6f")
    yield _figure_line("variance of all update steps", result.variance, of_variance, ".4e")
    if not problem.deterministic:
        yield _figure_line("deviation of w", result.deviation, of_deviation, ".4e")
        yield (
            f"an update step is nearly normal: excess kurtosis {expected.kurtosis:+.4f}, for which "
            "the variance's interval allows"
        )
    for why in dict.fromkeys(agreement.why for agreement in agreements if agreement.why):
        yield f"not judged: {why}"


def spread_lines(problem: Problem, result: TrainingResult) -> Iterator[str]:
    """Whether the ranks hold the same weights at the end."""
    if result.spread == 0.0:
        yield f"all {problem.ranks} ranks hold the same weights at the end, bit for bit"
        if problem.deterministic:
            yield "  but this shows nothing: without noise all ranks see the same examples"
        return
    apart = float((result.spreads > 0).mean())
    typical = math.sqrt(float(result.weights.var(axis=0, ddof=1).mean()))
    yield (
        f"the ranks hold DIFFERENT weights at the end, in {apart:.1%} of the experiments: up to "
        f"{result.spread:.2e} apart"
    )
    yield (
        f"  the standard deviation over the ranks is {typical:.2e}; the mean weight, which moved "
        f"by {abs(result.w - 1):.2e}, does not show this"
    )


def figure(value: float, form: str) -> str:
    """The number as text; "0" if it is so small that it is only rounding."""
    return "0" if abs(value) < 1e-24 else format(value, form)


def _figure_line(what: str, measured: float, agreement: Agreement, form: str) -> str:
    verdict = {True: "agree", False: "DO NOT AGREE", None: "not judged"}[agreement.holds]
    low, high = agreement.low, agreement.high
    interval = "" if low == high else f"{format(low, form)} .. {format(high, form)}"
    closed = figure(agreement.value, form)
    return f"{what:<28}{figure(measured, form):>12}{interval:>28}{closed:>14}   {verdict}"
