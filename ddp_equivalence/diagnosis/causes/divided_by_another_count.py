"""The loss divides by another count of the batch than the loss of the big batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.divisors import (
    Count,
    CountsByRank,
    RatioOfCounts,
    counts_by_rank,
    ratio_of_counts,
)
from ddp_equivalence.diagnosis.hypothesis import (
    LOSS_ROUNDING,
    Hypothesis,
    Indication,
    Prediction,
    Words,
    WrongFactor,
    common_loss_factor,
    losses_close,
)
from ddp_equivalence.diagnosis.lines.of_loss import last_backward, line_of_loss, losses_before
from ddp_equivalence.diagnosis.lines.of_reduction import (
    averages,
    is_unseen,
    line_of_reduction,
    line_that_scales_gradients,
)
from ddp_equivalence.diagnosis.lines.origins import divisors
from ddp_equivalence.diagnosis.lines.source_tree import run_lines
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

FEW_DIGITS = "2"
"""A number of so few digits may have been written down as it is."""


def predict(view: View) -> Sequence[Prediction]:
    """Each rank's loss divides by a count of its own that is not the right one."""
    return [Prediction(view.on_every_rank(one.held), one.text) for one in counts_by_rank(view)]


def factors(view: View) -> Sequence[WrongFactor]:
    """The ratio of the right count to another one."""
    return [WrongFactor(one.factor, one.text) for one in _ratios(view)]


def _ratios(view: View) -> list[RatioOfCounts]:
    """The ratios that the gradients have, without those that may be a number that somebody wrote.

    0.5, 3 and 0.94 are ratios of two counts of many a batch. They need a division that was seen.
    """
    return [
        one
        for one in ratio_of_counts(view)
        if not _has_few_digits(one.factor) or divided_by(view, one.wrong)
    ]


def _has_few_digits(factor: float) -> bool:
    return any(
        isclose(one, float(f"{one:.{FEW_DIGITS}g}"), rel_tol=1e-6) for one in (factor, 1 / factor)
    )


def divided_by(view: View, wrong: Count) -> float | None:
    """The number that gradients, or a loss that the rank had before, were seen to be divided by.

    It is the count itself, or the equal part of it that each of several ranks has. A rank that
    divides by its own right count has another cause.
    """
    count = wrong.value
    factors = (
        call.change.factor
        for rank in view.observed.by_rank
        for call in view.observed.calls.of(rank)
        if call.change is not None and call.change.factor
    )
    if any(isclose(one * count, 1.0, rel_tol=LOSS_ROUNDING) for one in factors):
        return count
    backward = last_backward(view)
    losses = losses_before(view, backward) if backward is not None else []
    seen = [
        earlier.value / later.value
        for place, later in enumerate(losses)
        for earlier in losses[:place]
        if later.what.startswith("DivBackward") and later.value and earlier.value
    ]
    layout = view.setting.layout
    numbers = {view.world_size, layout.nodes, view.parts.micro_batches_per_rank}
    part = count / view.world_size if wrong.of_all else count
    wanted = [one for one in (count, part) if one not in numbers]
    found = (of for of in wanted for one in seen if isclose(one, of, rel_tol=LOSS_ROUNDING))
    return next(found, None)


def indication(view: View) -> Indication | None:
    """Looks for the division itself, or else for losses that have the factor already."""
    ratios = _ratios(view)
    for one in ratios:
        seen = divided_by(view, one.wrong)
        if seen is not None:
            part = "" if seen == one.wrong.value else ", the part of one rank,"
            return Indication(True, f"a division by {text_of(seen, '.6g')}{part} was seen")
    common = common_loss_factor(view)
    for one in ratios:
        if common is not None and losses_close(common, one.factor):
            times = text_of(one.factor, ".4g")
            return Indication(True, f"every backward began at {times} times the loss of its rows")
    return None


def words(view: View) -> Words | None:
    """Less than the sentence says, where nothing of a wrong divisor was seen."""
    ratios = _ratios(view)
    if not ratios or indication(view) is not None:
        return None
    wrong, right = (text_of(one.value, ".6g") for one in (ratios[0].wrong, ratios[0].right))
    sentence = (
        f"Gradients are {text_of(ratios[0].factor, '.4g')} times what they should be. That is "
        f"{right} / {wrong}, two counts of the batch, so the loss may divide by the wrong one."
    )
    return Words(sentence, f"gradients are {right} / {wrong} of the right ones", is_guess=True)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss or the gradients are divided, and where the divisor comes from."""
    ratios, own = _ratios(view), counts_by_rank(view)
    scaled = None
    for one in ratios:
        scaled = scaled or line_that_scales_gradients(view, 1 / one.wrong.value)
    if scaled is None:
        scaled = line_of_loss(view, _note(ratios, own), True)
    if scaled is None:
        return ()
    rank = min(view.observed.by_rank, default=0)
    reduced = line_of_reduction(view) if own and not ratios else None
    made = [
        PointedLine(link.line, f"sets {link.name}, the number at line {scaled.line.number}")
        for link in divisors(run_lines(view, rank), scaled.line)[:1]
        if link.line != scaled.line
    ]
    return in_order(view, *made, scaled, reduced)


def _note(ratios: Sequence[RatioOfCounts], own: Sequence[CountsByRank]) -> str:
    if ratios:
        wrong, right = (text_of(one.value, ".6g") for one in (ratios[0].wrong, ratios[0].right))
        return f"as if divided by {wrong}; the right count is {right}"
    return f"as if divided by the rank's {own[0].unit}" if own else ""


def fix(view: View) -> str:
    """Divide by the right count."""
    ratios, own = _ratios(view), counts_by_rank(view)
    if ratios:
        one = ratios[0]
        wrong, right = (text_of(count.value, ".6g") for count in (one.wrong, one.right))
        return f"divide by {right} ({one.right.unit}), not by {wrong}."
    if not own:
        return "divide by what the loss of the big batch divides by."
    total = text_of(own[0].total, ".6g")
    summed = f"divide the summed loss by {total} ({own[0].right_unit}, on all ranks)"
    if is_unseen(view):
        return f"{summed}; under DDP, multiply it by {view.world_size} too."
    if averages(view):
        return f"{summed}, and multiply it by {view.world_size} (world size)."
    return f"{summed}, and add the ranks' gradients up."


HYPOTHESIS = Hypothesis(
    name="divided_by_another_count",
    sentence="The loss divides by another count of the batch than the loss of the big batch does.",
    look_at="the divisor of the loss: it must count what the loss of the big batch counts "
    "(examples, or tokens that are not ignored), in the whole window and on all ranks",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another batch with another number of examples or tokens: the factor changes.",
    headline="the loss divides by another count",
    lines=lines,
    fix=fix,
    words=words,
)
