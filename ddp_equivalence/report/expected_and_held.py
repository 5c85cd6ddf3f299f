"""The argument: what the big batch's gradient is, and which multiple of it the ranks hold.

Its lines begin with Let, Then, With, But. The last ones say what the losses are divided by.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, Style
from ddp_equivalence.report.wrapping import plural, rank_names, ratio_text, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.report.verdict import Verdict

WRONG_DIVISORS = frozenset(
    (
        *("sum_not_mean", "mean_not_sum", "averaged_twice", "divided_by_local_world_size"),
        *("uneven_shards_weighted_equally", "token_counts_weighted_equally"),
        *("local_loss_summed", "accumulation_not_divided", "divided_by_another_count"),
    )
)
"""Causes that are a wrong divisor, which the right divisor corrects."""

NO_MULTIPLE = 0.01
"""A rank holds no multiple of g if the nearest multiple leaves more than this unexplained."""

NOT_NEAR = 0.5
"""If the nearest multiple leaves more than this, it says nothing."""

ROUNDING = 1e-7
"""An unexplained part below this is rounding: it is computed as a difference of two squares."""


def expected_and_held_lines(verdict: Verdict) -> list[Line]:
    """The lines Let, Then, With (for updates), But, and whose mean it is."""
    comparison = verdict.comparison
    assert comparison is not None
    layout = verdict.case.ranks
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes (simulated on one host)"
    quantity = "gradient of" if verdict.compare == "gradients" else "update of the weights by"
    examples = " + ".join(map(str, verdict.examples))
    lines = _line_of_argument(
        "Let",
        f"g = {quantity} the big batch, {examples} examples; "
        f"W = {layout.world_size} {plural(layout.world_size, 'rank')} on {nodes}",
    )
    for text in _held(comparison):
        lines += _line_of_argument("Then", text)
    if verdict.compare == "update":
        steps = len(verdict.examples)
        sgd = f"plain SGD, learning rate {verdict.lr:g}, {steps} {plural(steps, 'step')}"
        lines += _line_of_argument("With", f"{sgd}: is that what the step does?")
    lines += _line_of_argument("But", verdict.promise or "every rank should hold 1 g")
    return [*lines, *_divisors_lines(verdict)]


def _line_of_argument(word: str, text: str) -> list[Line]:
    return [Line(line) for line in wrapped(f"  {word:<7}{text}", "         ", first="")]


def _divisors_lines(verdict: Verdict) -> list[Line]:
    """What the losses and the reduction divide by, and what would be right."""
    divisors = verdict.divisors
    named_otherwise = verdict.cause is not None and not WRONG_DIVISORS & set(verdict.causes)
    if divisors is None or named_otherwise:
        return []
    if divisors.kind == "sum":
        text = "The loss is a sum, divided by nothing: the ranks' losses add up to the big batch's"
    else:
        counts = _of_every_rank(divisors.counts, ".6g")
        text = (
            f"The loss of a rank's own shard is a mean over {counts} {divisors.unit}; "
            f"the loss of the big batch is a mean over {divisors.big_batch:g}"
        )
    if divisors.reduction is not None and _is_whole(divisors.reduction):
        divisor = "nothing" if round(divisors.reduction) == 1 else f"{round(divisors.reduction)}"
        text += f"; altogether the ranks' gradients were divided by {divisor}"
    if divisors.right_factors is not None and verdict.cause is not None:
        factors = _of_every_rank(divisors.right_factors, ".4g")
        text += f". To be right, multiply the loss as it is now by {factors}"
        if divisors.kind == "mean" and divisors.reduction is not None:
            reduction = text_of(divisors.reduction, ".4g")
            text += f", or the summed loss by {reduction} / {divisors.big_batch:g}"
    question = "  Whose mean is it?"
    first, *more = wrapped(f"{question} {text}.", "    ", first="")
    return [Line(first, Style.LABEL, styled=len(question)), *map(Line, more)]


def _is_whole(number: float) -> bool:
    """True for a number of ranks, examples or micro-batches, up to rounding."""
    return round(number) >= 1 and abs(number - round(number)) < 1e-3 * number


def _of_every_rank(numbers: tuple[float, ...], number_format: str) -> str:
    """The number that all ranks have in common, or else the number of each rank, in order."""
    texts = [text_of(number, number_format) for number in numbers]
    if len(set(texts)) == 1:
        return texts[0]
    shown = ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
    return f"{shown} (by rank)"


def _held(comparison: Comparison) -> Iterator[str]:
    """One sentence for each group of ranks that hold the same multiple of the big batch."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank in comparison.ranks:
        text = _held_by_rank(comparison, rank)
        if text is not None:
            ranks_by_text.setdefault(text, []).append(rank)
    for text, ranks in ranks_by_text.items():
        if len(ranks) == len(comparison.ranks) > 1:
            yield f"every rank holds {text}"
        else:
            yield f"{rank_names(ranks)} {'holds' if len(ranks) == 1 else 'hold'} {text}"


def _held_by_rank(comparison: Comparison, rank: int) -> str | None:
    """The multiple k g that is nearest to what the rank holds; None if g is zero."""
    errors = [
        (parameter.norm, error)
        for parameter in comparison.parameters
        for error in parameter.by_rank
        if error.rank == rank and parameter.norm > 0
    ]
    expected = sum(norm**2 for norm, _ in errors)
    if not expected:
        return None
    factor = sum(error.factor * norm**2 for norm, error in errors) / expected
    held = sum((error.ratio * norm) ** 2 for norm, error in errors)
    unexplained = max(0.0, 1 - factor**2 * expected / held) ** 0.5 if held > 0 else 0.0
    if isnan(factor):
        return "NaN: not a number"
    if unexplained > NOT_NEAR:
        return "no multiple of g, and nothing near one"
    rest = f"{text_of(unexplained, '.2g')} of the norm"
    if unexplained > NO_MULTIPLE:
        return f"no multiple of g (nearest: {text_of(factor, '.2f')} g, {rest} unexplained)"
    rest = "nothing" if unexplained < ROUNDING else rest
    return f"{ratio_text(factor)} g   (unexplained: {rest})"
