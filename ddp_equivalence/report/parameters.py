"""The numbers: which parameters differ, by how much, and the limit of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, Style, paragraph
from ddp_equivalence.report.wrapping import ratio_text

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison, ParameterComparison
    from ddp_equivalence.report.verdict import Verdict

MOST_PARAMETERS = 20
MOST_RIGHT = 8
MOST_DISAGREEING = 4

NUMBER_COLUMNS = 48
"""Columns that the numbers of a row and its indent take."""


def structure_lines(verdict: Verdict) -> list[Line]:
    """Names, shapes and types that are not those of the big batch, and ranks that disagree."""
    comparison = verdict.comparison
    assert comparison is not None
    structure = comparison.structure[:MOST_PARAMETERS]
    lines = [Line(f"    {text}") for text in structure]
    more = len(comparison.structure) - len(structure)
    if more > 0:
        lines.append(Line(f"    ... and {more} more"))
    disagreeing = [one.name for one in comparison.parameters if not one.ranks_agree]
    if disagreeing:
        more_names = ", ..." if len(disagreeing) > MOST_DISAGREEING else ""
        names = ", ".join(disagreeing[:MOST_DISAGREEING]) + more_names
        lines += paragraph(
            f"the ranks do not agree bit for bit on {len(disagreeing)} of "
            f"{len(comparison.parameters)} parameters: {names}",
            "    ",
        )
    return [Line("  Structure", Style.LABEL), *lines] if lines else []


def parameters_lines(verdict: Verdict) -> list[Line]:
    """The table of the parameters that differ, worst first, and the names of those that are right.

    It is empty if no parameter differs.
    """
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return []
    title = f"Parameters that differ: {len(differing)} of {len(comparison.parameters)}"
    shown = differing[:MOST_PARAMETERS]
    names = [f"{parameter.name}  {parameter.shape}" for parameter in shown]
    widest = settings.current().width - NUMBER_COLUMNS
    width = min(max(map(len, [title, *names])), widest)
    header = f"  {title:<{width + 4}}{'error':>9}{'floor':>9}{'limit':>9}{'ratio of norms':>17}"
    lines = [Line(header, Style.LABEL, styled=2 + len(title))]
    for name, parameter in zip(names, shown, strict=True):
        if len(name) > width:  # then its numbers stand below it, in their columns
            lines.append(Line(f"    {name}"))
            name = ""
        lines.append(Line(f"    {name:<{width + 2}}{_numbers(parameter)}"))
        lines += [Line(f"      {text}") for text in _element(parameter)]
    if len(differing) > len(shown):
        more = len(differing) - len(shown)
        lines.append(Line(f"    ... and {more} more (the worst are shown)"))
    lines += _right(comparison)
    reasons = Counter(parameter.limit.reason for parameter in differing)
    return [*lines, Line(f"    limit: {'; '.join(reasons)}")]


def _right(comparison: Comparison) -> list[Line]:
    """The parameters that are right: often they tell where the difference comes from."""
    right = [one.name for one in comparison.parameters if one.same and one.ranks_agree]
    if not right:
        return []
    more = f", ... ({len(right)} in all)" if len(right) > MOST_RIGHT else ""
    return paragraph(f"right: {', '.join(right[:MOST_RIGHT])}{more}", "    ")


def _numbers(parameter: ParameterComparison) -> str:
    worst, limit = parameter.worst, parameter.limit
    numbers = (text_of(one, ".1e") for one in (worst.error, limit.floor, limit.relative))
    return f"{''.join(f'{number:>9}' for number in numbers)}{ratio_text(worst.ratio):>17}"


def _element(parameter: ParameterComparison) -> Iterator[str]:
    """The worst element, if it alone is wrong, or if the parameter as a whole is right."""
    worst = parameter.worst
    if prod(parameter.shape) > 1 and (worst.alone or worst.error <= parameter.limit.relative):
        yield (
            f"element {list(worst.place)} on rank {worst.rank} is off by "
            f"{text_of(worst.element, '.1e')}, limit {text_of(parameter.limit.element, '.1e')}"
        )
