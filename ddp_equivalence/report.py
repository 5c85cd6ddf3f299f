"""Verdict -> text: verdict and name, cause, argument, picture, numbers, what else was considered,
evidence, how to repeat. A reader may stop after any block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import floor, isfinite, log10, prod
from typing import TYPE_CHECKING

from ddp_equivalence import session
from ddp_equivalence.evidence_report import at_the_loss, evidence_lines
from ddp_equivalence.failure_report import failure_blocks
from ddp_equivalence.prose import of_ranks, plural, wrapped
from ddp_equivalence.shares_report import shares_lines

if TYPE_CHECKING:
    from ddp_equivalence.comparison import Comparison, ParameterComparison
    from ddp_equivalence.diagnosis import Finding
    from ddp_equivalence.verdict import Verdict

MOST_PARAMETERS = 20
OUTPUT_LINES = 30
MOST_RULED_OUT = 6
MOST_RIGHT = 8


HALVES = {
    "together": "how gradients are put together. The ranks' own gradients, before any reduction, "
    "give the big batch",
    "before": "what each rank computes: its data, forward pass and loss. The ranks' own gradients "
    "are put together as they should be, but do not give the big batch",
}
"""Where a difference lies that has no name."""

STATISTICS = (
    "; a mean, variance or comparison over the batch (a normalisation, in-batch negatives) may see "
    "this rank's rows only"
)

OF_DIVISORS = frozenset(
    (
        *("sum_not_mean", "mean_not_sum", "averaged_twice", "divided_by_local_world_size"),
        *("uneven_shards_weighted_equally", "token_counts_weighted_equally"),
        *("local_loss_summed", "accumulation_not_divided"),
    )
)
"""Causes that are a wrong divisor, and mended by a right one."""


def render(verdict: Verdict) -> str:
    """The whole report."""
    blocks = {
        "same": _same,
        "different": _different,
        "unknown": _unknown,
    }[verdict.outcome]
    text = ("\n".join(line.rstrip() for line in block) for block in blocks(verdict) if block)
    return "\n\n".join(text) + "\n"


def error_line(error: float | None, floor: float | None, limit: float | None) -> str:
    """``error 3.1e-07  floor 2.4e-07  limit 2.0e-06``."""
    if error is None or limit is None:
        return "nothing compared"
    between = "" if floor is None else f"  floor {floor:.1e}"
    return f"error {error:.1e}{between}  limit {limit:.1e}"


def _same(verdict: Verdict) -> Iterator[list[str]]:
    comparison = verdict.comparison
    assert comparison is not None
    yield [f"{verdict.subject} is big_batch: same"]
    line = error_line(verdict.error, verdict.floor, verdict.limit)
    if verdict.nearest is not None:
        line += f"  nearest planted fault {verdict.nearest.distance:.1e}"
    worst = comparison.worst
    reason = f"limit: {worst.limit.reason}; worst parameter: {worst.name}" if worst else ""
    if verdict.nearest is not None:
        reason += f"; nearest fault: {verdict.nearest.cause}"
    yield [f"  {line}", *wrapped(reason, "  ")]
    yield evidence_lines(verdict)


def _different(verdict: Verdict) -> Iterator[list[str]]:
    named = " and ".join(verdict.causes) or "no known cause fits"
    yield [f"{verdict.subject} is not big_batch: {named}"]
    yield _cause(verdict)
    yield _argument(verdict)
    yield _structure(verdict)
    yield shares_lines(verdict)
    yield _parameters(verdict)
    yield [*_considered(verdict), *evidence_lines(verdict)]
    yield _outputs(verdict)


def _unknown(verdict: Verdict) -> Iterator[list[str]]:
    yield [f"{verdict.subject} against big_batch: unknown"]
    if verdict.failure is not None:
        yield from failure_blocks(verdict.failure, verdict.reason, verdict.second_look)
        yield _outputs(verdict)
    else:
        yield [
            *wrapped(f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.", "  "),
            "  Nothing was shown, which is not a pass.",
        ]
        if verdict.comparison is not None and verdict.comparison.parameters:
            line = error_line(verdict.error, verdict.floor, verdict.limit)
            yield [f"  {line}"]
    yield evidence_lines(verdict)


def _cause(verdict: Verdict) -> list[str]:
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        return _learned(verdict)
    lines = wrapped(best.sentence, "  ")
    if best.detail:
        lines += wrapped(f"Namely: {best.detail}", "  ")
    if best.because:
        lines += wrapped(f"Seen:    {best.because}", "  ")
    return [*lines, *wrapped(f"Look at: {best.look_at}", "  ")]


def _learned(verdict: Verdict) -> list[str]:
    """What is known of a difference that has no name."""
    comparison = verdict.comparison
    assert comparison is not None
    shares = verdict.shares
    learned = []
    numbers = [rank.ratio for one in comparison.parameters for rank in one.by_rank]
    if not all(map(isfinite, numbers)):
        ranks = [
            rank
            for rank, seen in verdict.observed.items()
            if any(one.loss is not None and not isfinite(one.loss) for one in seen.backwards)
        ]
        began = f": backward began at a loss that is none on {of_ranks(ranks)}" if ranks else ""
        learned.append(f"what the ranks hold is not a finite number{began}")
    if shares is not None and max(shares.unexplained.values()) > 1e-6:
        rest = max(shares.unexplained.values())
        learned.append(
            f"{rest:.2g} of what a rank holds is no mixture of the {shares.pieces}' gradients: "
            "statistics that examples share, other weights, other randomness, or damage on the way"
        )
    elif shares is not None:
        learned.append(
            f"what the ranks hold is a mixture of the {shares.pieces}' gradients with other "
            "weights than the big batch's: read the shares below"
        )
    if not comparison.ranks_agree:
        learned.append("the ranks do not hold the same")
    if verdict.repeated is False:
        learned.append("a second run left other bits: a race, or randomness without a seed")
    found = verdict.clues
    if found.weights:
        names = ", ".join(list(found.weights)[:4]) + (", ..." if len(found.weights) > 4 else "")
        times = ", ".join(dict.fromkeys(f"{one:.2g}" for one in found.weights.values()))
        learned.append(
            f"of {names}, what is off is {times} times the weights themselves: weight decay or a "
            "penalty that counts otherwise than in the big batch"
        )
    if found.loss is not None and (there := at_the_loss(verdict, found.loss)):
        learned.append(f"the big batch's loss is {found.loss:.4g}, and backward began {there}")
    lines = wrapped(f"Known of it: {'; '.join(learned)}.", "  ") if learned else []
    for module, finding in list((found.by_module or {}).items())[:4]:
        what = f"On the parameters of {module or 'the model itself'} alone it is {finding.cause}: "
        lines += wrapped(f"{what}{finding.sentence}", "  ")
        lines += wrapped(f"Look at: {finding.look_at}", "  ")
    if found.half:
        more = (
            STATISTICS if found.half == "before" and "no sum over" in verdict.why_no_shares else ""
        )
        lines += wrapped(f"Look at: {HALVES[found.half]}{more}", "  ")
    return lines


def _argument(verdict: Verdict) -> list[str]:
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
    return [*lines, *_whose_mean(verdict)]


def _whose_mean(verdict: Verdict) -> list[str]:
    found = verdict.whose_mean
    if found is None or (verdict.cause is not None and not OF_DIVISORS & set(verdict.causes)):
        return []
    if found.kind == "sum":
        loss = "The loss is a sum, so that the ranks' losses add up to the big batch's"
        whole = "by nothing"
    else:
        each = _alike(found.counts, "g")
        loss = f"On its own each rank's loss divides by its {each} {found.what}"
        whole = f"by {found.whole:g}"
    text = f"Whose mean is it? {loss}; the big batch divides {whole}"
    if found.divided is not None:
        by = "nothing" if abs(found.divided - 1) < 1e-3 else f"{found.divided:.4g}"
        text += f"; together the ranks' gradients were divided by {by}"
    if found.right is not None and verdict.cause is not None:
        text += f". Right would be {_alike(found.right, '.4g')} times the loss as it is now"
        if found.kind == "mean" and found.divided is not None:
            text += f", or {found.divided:.4g} / {found.whole:g} times the summed loss"
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
        held = f"{_factor(factor)} g"
        groups.setdefault((held, f"   (unexplained: {text})"), []).append(rank)
    for (held, rest_text), ranks in groups.items():
        everyone = len(ranks) == len(comparison.ranks) and len(ranks) > 1
        who = (
            "every rank holds"
            if everyone
            else f"{of_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'}"
        )
        yield f"{who} {held}{rest_text}"


def _factor(value: float) -> str:
    """With as many digits as it takes to see that it is not 1."""
    off = abs(value - 1)
    digits = 3 if off < 1e-11 or off > 0.005 else min(12, 1 - floor(log10(off)))
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.6g}"


def _structure(verdict: Verdict) -> list[str]:
    comparison = verdict.comparison
    assert comparison is not None
    lines = [f"    {line}" for line in comparison.structure[:MOST_PARAMETERS]]
    more = len(comparison.structure) - len(lines)
    if more > 0:
        lines.append(f"    ... and {more} more")
    if any("module." in line for line in lines):
        lines.append('    (names with "module." come from the wrapper: return the model\'s own)')
    if not comparison.ranks_agree:
        apart = [one.name for one in comparison.parameters if not one.ranks_agree]
        lines += wrapped(
            f"the ranks do not agree bit for bit on {len(apart)} of "
            f"{len(comparison.parameters)} parameters: {', '.join(apart[:4])}"
            f"{', ...' if len(apart) > 4 else ''}",
            "    ",
        )
    return ["  Structure", *lines] if lines else []


def _parameters(verdict: Verdict) -> list[str]:
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return []
    title = f"Parameters that differ: {len(differing)} of {len(comparison.parameters)}"
    shown = differing[:MOST_PARAMETERS]
    names = [f"{one.name}  {one.shape}" for one in shown]
    width = min(max(map(len, [title, *names])), session.current().width - 48)
    lines = [f"  {title:<{width + 4}}{'error':>9}{'floor':>9}{'limit':>9}{'ratio of norms':>17}"]
    for name, one in zip(names, shown, strict=True):
        lines.append(f"    {name:<{width + 2}}{_numbers(one)}")
        lines += [f"      {line}" for line in _element(one)]
    if len(differing) > len(shown):
        lines.append(f"    ... and {len(differing) - len(shown)} more (these are the worst)")
    lines += _right(comparison)
    reasons = Counter(one.limit.reason for one in differing)
    lines.append(f"    limit: {'; '.join(reasons)}")
    return lines


def _right(comparison: Comparison) -> list[str]:
    """Which parameters are as they should be: often it is these that tell."""
    right = [one.name for one in comparison.parameters if one.same and one.ranks_agree]
    if not right:
        return []
    more = f", ... ({len(right)} in all)" if len(right) > MOST_RIGHT else ""
    return wrapped(f"right: {', '.join(right[:MOST_RIGHT])}{more}", "    ")


def _numbers(one: ParameterComparison) -> str:
    worst = one.worst
    ratio = _factor(worst.ratio)
    return f"{worst.error:>9.1e}{one.limit.floor:>9.1e}{one.limit.relative:>9.1e}{ratio:>17}"


def _element(one: ParameterComparison) -> Iterator[str]:
    """Where a single element is off, if the others are not, or not as a whole."""
    worst = one.worst
    if prod(one.shape) > 1 and (worst.alone or worst.error <= one.limit.relative):
        yield (
            f"element {list(worst.place)} on rank {worst.rank} is off by {worst.element:.1e}, "
            f"limit {one.limit.element:.1e}"
        )


def _considered(verdict: Verdict) -> list[str]:
    accepted = [one for one in verdict.findings if one.accepted]
    alike = [one for one in verdict.findings if one.fits and not one.accepted]
    refused = [one for one in verdict.findings if not one.fits and one.shows]
    hidden = [one.cause for one in verdict.findings if not one.fits and not one.shows]
    lines = []
    if len(accepted) > 1:
        rivals = ", ".join(" and ".join(one.causes) for one in accepted)
        lines += wrapped(f"Cannot be told apart on this case: {rivals}", "  ")
        for one in accepted:
            if one.tell_apart:
                lines += wrapped(f"{one.cause} would stand out with {one.tell_apart}", "    ")
    if alike:
        told = "; ".join(
            f"{one.cause} ({one.because or 'nothing was seen of it'})" for one in alike
        )
        lines += wrapped(f"Same numbers, but: {told}", "  ")
    if refused:
        what = "Ruled out" if accepted else "Nearest, but none of them"
        lines += wrapped(f"{what}: {', '.join(_ruled_out(refused))}", "  ")
    if hidden:
        lines += wrapped(f"Would not show on this case: {', '.join(hidden)}", "  ")
    return lines


def _ruled_out(refused: list[Finding]) -> Iterator[str]:
    """The nearest few, those that predict the same as one."""
    by_rest: dict[str, list[str]] = {}
    for one in refused:
        rest = one.unexplained
        known = rest is not None and rest != float("inf")
        by_rest.setdefault(f"{rest:.2g} unexplained" if known else "", []).append(one.cause)
    for number, (rest_text, causes) in enumerate(by_rest.items()):
        if number == MOST_RULED_OUT:
            yield f"and {sum(map(len, list(by_rest.values())[number:]))} more"
            return
        names = causes[0] if len(causes) == 1 else f"{causes[0]} and {len(causes) - 1} like it"
        yield f"{names} ({rest_text})" if rest_text else names


def _outputs(verdict: Verdict) -> list[str]:
    said: dict[str, list[int]] = {}
    for rank, text in sorted(verdict.output.items()):
        if text.strip():
            said.setdefault(text.rstrip(), []).append(rank)
    lines = []
    for text, ranks in said.items():
        shown = text.splitlines()[-OUTPUT_LINES:]
        lines += [f"  Output of {of_ranks(ranks)}", *(f"    | {line}" for line in shown)]
    return lines
