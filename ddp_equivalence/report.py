"""Verdict -> text. The only prose in the package: verdict and name, cause, argument, picture,
numbers, what else was considered, evidence, how to repeat. A reader may stop after any block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ddp_equivalence.failure_report import failure_blocks
from ddp_equivalence.prose import WIDTH, plural, wrapped
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.shards import OWN

if TYPE_CHECKING:
    from ddp_equivalence.comparison import Comparison, ParameterComparison
    from ddp_equivalence.diagnosis import Finding
    from ddp_equivalence.verdict import Verdict

MOST_PARAMETERS = 20
OUTPUT_LINES = 30
MOST_RANKS = 8


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
    yield _evidence(verdict)


def _different(verdict: Verdict) -> Iterator[list[str]]:
    yield [f"{verdict.subject} is not big_batch: {verdict.cause or 'no known cause fits'}"]
    best = verdict.findings[0] if verdict.findings else None
    if best is not None and best.accepted:
        yield [*wrapped(best.sentence, "  "), *wrapped(f"Look at: {best.look_at}", "  ")]
    yield _argument(verdict)
    yield _structure(verdict)
    yield _shares(verdict)
    yield _parameters(verdict)
    yield [*_considered(verdict), *_evidence(verdict)]
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
    yield _evidence(verdict)


def _argument(verdict: Verdict) -> list[str]:
    comparison = verdict.comparison
    assert comparison is not None
    layout = verdict.case.ranks
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes (simulated on one host)"
    what = "gradient" if verdict.compare == "gradients" else "update of the weights"
    examples = " + ".join(map(str, verdict.examples))
    lines = [
        f"  Let    g = {what} of the big batch, {examples} examples; "
        f"W = {layout.world_size} {plural(layout.world_size, 'rank')} on {nodes}"
    ]
    for text in _what_ranks_hold(comparison):
        lines.append(f"  Then   {text}")
    if verdict.compare == "update":
        steps = len(verdict.examples)
        lines.append(
            f"  With   plain SGD, learning rate {verdict.lr:g}, {steps} {plural(steps, 'step')}: "
            "is that what the step does?"
        )
    promise = verdict.promise or "the step is held to 1 g on every rank"
    return [*lines, *wrapped(f"  But    {promise}", "         ", first="")]


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
        groups.setdefault((f"{factor:.3f} g", f"   (unexplained: {text})"), []).append(rank)
    for (held, rest_text), ranks in groups.items():
        everyone = len(ranks) == len(comparison.ranks) and len(ranks) > 1
        who = "every rank holds" if everyone else _ranks(ranks)
        yield f"{who} {held}{rest_text}"


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
        lines.append(
            f"    the ranks do not agree bit for bit on {len(apart)} of "
            f"{len(comparison.parameters)} parameters: {', '.join(apart[:4])}"
            f"{', ...' if len(apart) > 4 else ''}"
        )
    return ["  Structure", *lines] if lines else []


def _shares(verdict: Verdict) -> list[str]:
    shares = verdict.shares
    if shares is None:
        return []
    layout = verdict.case.ranks
    ranks = range(min(layout.world_size, MOST_RANKS))
    head = "    " + " " * 22
    lines = ["  Share of each rank's examples in the result (1.00 = as often as in the big batch)"]
    nodes = [layout.rows[rank].node for rank in ranks]
    first = [rank == 0 or nodes[rank] != nodes[rank - 1] for rank in ranks]
    lines.append(head + "".join(f"{f'node {nodes[r]}' if first[r] else '':>9}" for r in ranks))
    lines.append(head + "".join(f"{f'rank {rank}':>9}" for rank in ranks))
    lines.append(f"    {'expected':<22}" + "".join(f"{1:>9.2f}" for _ in ranks))
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, row in shares.by_rank.items():
        text = tuple(_share(row[r]) for r in ranks)
        rows.setdefault(text, []).append(rank)
    for text, of_ranks in rows.items():
        everyone = len(of_ranks) == len(shares.by_rank)
        name = "measured" if everyone else f"measured, {_ranks(of_ranks, short=True)}"
        note = "     same on all ranks" if everyone and len(of_ranks) > 1 else ""
        lines.append(f"    {name:<22}" + "".join(f"{one:>9}" for one in text) + note)
    rest = max(shares.unexplained.values())
    if rest > 1e-6:
        lines.append(
            f"    no mixture of examples explains {rest:.2g} of it (shared statistics, other "
            "weights or randomness?)"
        )
    if layout.world_size > MOST_RANKS:
        lines.append(f"    (the first {MOST_RANKS} of {layout.world_size} ranks)")
    return lines


def _share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{0.0 if abs(value) < 0.005 else value:.2f}"  # not -0.00


def _parameters(verdict: Verdict) -> list[str]:
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return []
    title = f"Parameters that differ: {len(differing)} of {len(comparison.parameters)}"
    shown = differing[:MOST_PARAMETERS]
    names = [f"{one.name}  {one.shape}" for one in shown]
    width = min(max(map(len, [title, *names])), WIDTH - 48)
    lines = [f"  {title:<{width + 4}}{'error':>9}{'floor':>9}{'limit':>9}{'ratio of norms':>17}"]
    for name, one in zip(names, shown, strict=True):
        lines.append(f"    {name:<{width + 2}}{_numbers(one)}")
    if len(differing) > len(shown):
        lines.append(f"    ... and {len(differing) - len(shown)} more (these are the worst)")
    reasons = Counter(one.limit.reason for one in differing)
    lines.append(f"    limit: {'; '.join(reasons)}")
    return lines


def _numbers(one: ParameterComparison) -> str:
    worst = one.worst
    note = ""
    if worst.error <= one.limit.relative:
        note = f"   one element off by {worst.element:.1e}, limit {one.limit.element:.1e}"
    return (
        f"{worst.error:>9.1e}{one.limit.floor:>9.1e}{one.limit.relative:>9.1e}"
        f"{worst.ratio:>17.3f}{note}"
    )


def _considered(verdict: Verdict) -> list[str]:
    accepted = [one for one in verdict.findings if one.accepted]
    refused = [one for one in verdict.findings if not one.accepted and one.shows]
    hidden = [one.cause for one in verdict.findings if not one.accepted and not one.shows]
    lines = []
    if len(accepted) > 1:
        rivals = ", ".join(one.cause for one in accepted)
        lines += wrapped(f"Cannot be told apart on this case: {rivals}", "  ")
    if refused:
        lines += wrapped(f"Ruled out: {', '.join(map(_left, refused))}", "  ")
    if hidden:
        lines += wrapped(f"Would not show on this case: {', '.join(hidden)}", "  ")
    return lines


def _left(one: Finding) -> str:
    if one.unexplained is None or one.unexplained == float("inf"):
        return one.cause
    return f"{one.cause} ({one.unexplained:.2g} unexplained)"


def _evidence(verdict: Verdict) -> list[str]:
    evidence = verdict.evidence
    lane = verdict.lane
    parts = []
    if evidence:
        parts.append(f"{len(evidence)} {plural(len(evidence), 'rank')} reported")
        parts.append(_ledger(verdict))
        parts.append(_collectives(verdict))
        replicas = evidence[0].notes.get("replicas") if 0 in evidence else None
        if replicas:
            parts.append(f"{replicas} replicas ran")
    comparison = verdict.comparison
    if comparison is not None and comparison.parameters:
        parts.append(
            f"{len(comparison.parameters)} parameters ({comparison.elements} elements) compared "
            f"on {len(comparison.ranks)} {plural(len(comparison.ranks), 'rank')}"
        )
    noise = (
        [one.name for one in comparison.parameters if one.limit.only_rounding and one.norm]
        if comparison
        else []
    )
    if noise:
        parts.append(f"of these hold nothing but rounding: {', '.join(noise[:4])}")
    devices = sorted({one.device for one in evidence.values()}) or [lane.device_type]
    where = f"{lane.name} ({lane.reason})" if lane.reason else lane.name
    parts.append(f"{where}, torch {torch.__version__}, {', '.join(devices)}")
    lines = wrapped(f"Evidence: {'; '.join(part for part in parts if part)}", "  ")
    lines += wrapped(f"Case:     {verdict.case}", "  ")
    if verdict.repeat:
        lines.append(f"  Repeat:   {verdict.repeat}")  # in one piece, to be pasted
    return lines


def _ledger(verdict: Verdict) -> str:
    if verdict.case.shards == OWN:
        return "the step takes its own examples"
    if len(verdict.evidence) != verdict.case.ranks.world_size:
        return ""
    given = Counter(
        (step, index)
        for one in verdict.evidence.values()
        for step, indices in enumerate(one.examples or ())
        for index in indices
    )
    total = sum(verdict.examples)
    once = sum(count == 1 for count in given.values())
    return f"{once} of {total} examples given to one rank each"


def _collectives(verdict: Verdict) -> str:
    logs = [one.collectives for one in verdict.evidence.values()]
    if not logs or logs[0] is None:
        return ""
    forgotten = sum(one.elements for one in logs[0] if one.op == FORGOTTEN)
    counts = Counter(one.op for one in logs[0] if one.op != FORGOTTEN)
    elements: Counter[str] = Counter()
    for one in logs[0]:
        elements[one.op] += one.elements
    if not counts:
        return "no collective ran"
    found = [
        f"{count} {op} of {elements[op]} {plural(elements[op], 'element')}"
        for op, count in counts.items()
    ]
    before = f" (and {forgotten} earlier ones, no longer held)" if forgotten else ""
    return f"rank 0 issued {', '.join(found)}{before}"


def _outputs(verdict: Verdict) -> list[str]:
    said: dict[str, list[int]] = {}
    for rank, text in sorted(verdict.output.items()):
        if text.strip():
            said.setdefault(text.rstrip(), []).append(rank)
    lines = []
    for text, ranks in said.items():
        shown = text.splitlines()[-OUTPUT_LINES:]
        lines += [f"  Output of {_ranks(ranks, short=True)}", *(f"    | {line}" for line in shown)]
    return lines


def _ranks(ranks: list[int], short: bool = False) -> str:
    names = ", ".join(map(str, ranks))
    if short:
        return f"{plural(len(ranks), 'rank')} {names}"
    return f"rank {names} holds" if len(ranks) == 1 else f"ranks {names} hold"
