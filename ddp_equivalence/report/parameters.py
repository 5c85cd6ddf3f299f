"""The numbers: which parameters differ, by how much, and what was allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.report.wrapping import to_see_that_it_is_not_1, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison, ParameterComparison
    from ddp_equivalence.report.verdict import Verdict

MOST_PARAMETERS = 20
MOST_RIGHT = 8


def structure_lines(verdict: Verdict) -> list[str]:
    """Names, shapes and types that are not those of the big batch, and ranks that disagree."""
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


def parameters_lines(verdict: Verdict) -> list[str]:
    """The table, worst first, and which parameters are right."""
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return []
    title = f"Parameters that differ: {len(differing)} of {len(comparison.parameters)}"
    shown = differing[:MOST_PARAMETERS]
    names = [f"{one.name}  {one.shape}" for one in shown]
    width = min(max(map(len, [title, *names])), settings.current().width - 48)
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
    ratio = to_see_that_it_is_not_1(worst.ratio)
    return f"{worst.error:>9.1e}{one.limit.floor:>9.1e}{one.limit.relative:>9.1e}{ratio:>17}"


def _element(one: ParameterComparison) -> Iterator[str]:
    """Where a single element is off, if the others are not, or not as a whole."""
    worst = one.worst
    if prod(one.shape) > 1 and (worst.alone or worst.error <= one.limit.relative):
        yield (
            f"element {list(worst.place)} on rank {worst.rank} is off by {worst.element:.1e}, "
            f"limit {one.limit.element:.1e}"
        )
