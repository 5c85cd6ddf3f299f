"""Adds to the explanations that are believed the lines of code to look at, and what to write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.hypothesis import Hypothesis
from ddp_equivalence.diagnosis.lines.call_sites import OF_PLACE, with_call_sites
from ddp_equivalence.diagnosis.lines.dropped_results import (
    fix_of_dropped_results,
    lines_of_dropped_results,
)
from ddp_equivalence.diagnosis.lines.lines_around_reduction import lines_of_divisor
from ddp_equivalence.diagnosis.lines.lines_of_groups import with_origins_of_groups
from ddp_equivalence.diagnosis.lines.lost_results import lines_of_lost_results
from ddp_equivalence.diagnosis.lines.made_from import lines_behind
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.whereabouts import MOST_LINES

_BY_NAME = {hypothesis.name: hypothesis for hypothesis in HYPOTHESES}

OF_THE_LOSS = frozenset(
    {
        *("mean_not_sum", "sum_not_mean", "gather_without_gradient", "accumulation_not_divided"),
        *("uneven_shards_weighted_equally", "token_counts_weighted_equally", "averaged_twice"),
        *("mean_of_node_means", "scaler_differs_between_ranks", "local_loss_summed"),
        *("gradient_scaled_not_unscaled", "last_window_divided_by_full"),
        *("batch_statistics_local", "statistic_not_additive", "divided_by_local_world_size"),
        "divided_by_another_count",
    }
)
"""The causes that a wrong count or a wrong loss may have."""

OF_A_NUMBER = frozenset(
    {"averaged_twice", "sum_not_mean", "gradient_scaled_not_unscaled", "accumulation_not_divided"}
    | {"last_window_divided_by_full", "local_loss_summed", "gather_without_gradient"}
)
"""The causes whose faulty line multiplies or divides by a number."""


def pointed(findings: Iterable[Finding], view: View) -> tuple[Finding, ...]:
    """The findings; those that are believed get their lines and their fix."""
    return tuple(_pointed(finding, view) if finding.accepted else finding for finding in findings)


def _pointed(finding: Finding, view: View) -> Finding:
    hypothesis = _BY_NAME.get(finding.cause)
    if hypothesis is None:
        return finding
    words = hypothesis.words(view) or finding
    return replace(
        finding,
        sentence=words.sentence,
        headline=words.headline,
        is_guess=words.is_guess,
        fix=fix_of_dropped_results(view) or hypothesis.fix(view),
        lines=_lines(hypothesis, view),
        more=tuple(_pointed(one, view) for one in finding.more),
    )


def _lines(hypothesis: Hypothesis, view: View) -> tuple[PointedLine, ...]:
    """Those of the cause, and a collective whose result nothing uses.

    Where the reduction is wrong, only a collective of gradients can have to do with it.
    """
    lines = hypothesis.lines(view)
    if hypothesis.name in OF_PLACE:
        lines = with_call_sites(view, lines)
    lines = with_origins_of_groups(view, lines)
    known = {one.line for one in lines}
    lost = lines_of_lost_results(view, hypothesis.name not in OF_THE_LOSS)
    lost += [one for one in lines_of_dropped_results(view) if one not in lost]
    found = [*(one for one in lost if one.line not in known), *lines]
    rank = min(view.observed.by_rank, default=0)
    if hypothesis.name in OF_A_NUMBER and len(found) < MOST_LINES:
        made = [line for one in lines if one.is_fault for line in _numbers(view, rank, one)]
        found = [*(one for one in made[:1] if one.line not in known), *found]
    faults = [one for one in found if one.is_fault and not one.missing]
    for fault in faults[:1]:
        known = {one.line for one in found}
        behind = lines_behind(run_lines(view, rank), fault.line, MOST_LINES, only_attributes=True)
        found += [one for one in behind if one.line not in known]
    return tuple(found[: max(MOST_LINES, len(lines))])


def _numbers(view: View, rank: int, pointed: PointedLine) -> list[PointedLine]:
    return [replace(one, is_fault=True) for one in lines_of_divisor(view, rank, pointed.line)]
