"""The argument: what the big batch's gradient is, what the ranks hold, and whose mean that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.report.wrapping import of_ranks, plural, to_see_that_it_is_not_1, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.report.verdict import Verdict

OF_DIVISORS = frozenset(
    (
        *("sum_not_mean", "mean_not_sum", "averaged_twice", "divided_by_local_world_size"),
        *("uneven_shards_weighted_equally", "token_counts_weighted_equally"),
        *("local_loss_summed", "accumulation_not_divided"),
    )
)
"""Causes that are a wrong divisor, and mended by a right one."""


def argument_lines(verdict: Verdict) -> list[str]:
    """Let, then, but, and whose mean it is."""
    comparison = verdict.comparison
    assert comparison is not None
    layout = verdict.case.ranks
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes (simulated on one host)"
    what = "gradient" if verdict.compare == "gradients" else "update of the weights"
    examples = " + ".join(map(str, verdict.examples))
    lines = wrapped(
        f"  Let    g = {what} of the big batch, {examples} examples; "
        f"W = {layout.world_size} {plural(layout.world_size, 'rank')} on {nodes}",
        "         ",
        first="",
    )
    for text in _what_ranks_hold(comparison):
        lines += wrapped(f"  Then   {text}", "         ", first="")
    if verdict.compare == "update":
        steps = len(verdict.examples)
        lines += wrapped(
            f"  With   plain SGD, learning rate {verdict.lr:g}, {steps} {plural(steps, 'step')}: "
            "is that what the step does?",
            "         ",
            first="",
        )
    promise = verdict.promise or "the step is held to 1 g on every rank"
    lines += wrapped(f"  But    {promise}", "         ", first="")
    return [*lines, *_divisors(verdict)]


def _divisors(verdict: Verdict) -> list[str]:
    divisors = verdict.divisors
    if divisors is None or (verdict.cause is not None and not OF_DIVISORS & set(verdict.causes)):
        return []
    if divisors.kind == "sum":
        loss = "The loss is a sum, so that the ranks' losses add up to the big batch's"
        whole = "by nothing"
    else:
        each = _alike(divisors.counts, "g")
        loss = f"On its own each rank's loss divides by its {each} {divisors.unit}"
        whole = f"by {divisors.big_batch:g}"
    text = f"Whose mean is it? {loss}; the big batch divides {whole}"
    if divisors.reduction is not None:
        by = "nothing" if abs(divisors.reduction - 1) < 1e-3 else f"{divisors.reduction:.4g}"
        text += f"; together the ranks' gradients were divided by {by}"
    if divisors.right_factors is not None and verdict.cause is not None:
        right = _alike(divisors.right_factors, ".4g")
        text += f". Right would be {right} times the loss as it is now"
        if divisors.kind == "mean" and divisors.reduction is not None:
            text += f", or {divisors.reduction:.4g} / {divisors.big_batch:g} times the summed loss"
    return wrapped(f"  {text}.", "    ", first="")


def _alike(values: tuple[float, ...], how: str) -> str:
    """One number if all are alike, else the number of every rank in turn."""
    texts = [format(value, how) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    shown = ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
    return f"{shown} (by rank)"


def _what_ranks_hold(comparison: Comparison) -> Iterator[str]:
    """One line a group of ranks that hold the same multiple of the big batch."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in comparison.ranks:
        found = [
            (one.norm, row)
            for one in comparison.parameters
            for row in one.by_rank
            if row.rank == rank and one.norm > 0
        ]
        total = sum(norm**2 for norm, _ in found)
        if not total:
            continue
        factor = sum(row.factor * norm**2 for norm, row in found) / total
        size = sum((row.ratio * norm) ** 2 for norm, row in found)
        rest = max(0.0, 1 - factor**2 * total / size) ** 0.5 if size > 0 else 0.0
        if factor != factor:
            groups.setdefault(("NaN: not a number", ""), []).append(rank)
            continue
        # Below 1e-7 the difference of two sums of squares is rounding.
        if rest > 0.01:
            held = f"no multiple of g (nearest {factor:.2f} g, which leaves {rest:.2g} of it)"
            groups.setdefault((held, ""), []).append(rank)
            continue
        text = "nothing" if rest < 1e-7 else f"{rest:.2g} of it"
        held = f"{to_see_that_it_is_not_1(factor)} g"
        groups.setdefault((held, f"   (unexplained: {text})"), []).append(rank)
    for (held, rest_text), ranks in groups.items():
        everyone = len(ranks) == len(comparison.ranks) and len(ranks) > 1
        who = (
            "every rank holds"
            if everyone
            else f"{of_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'}"
        )
        yield f"{who} {held}{rest_text}"
