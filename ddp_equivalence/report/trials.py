"""The edits of the step that were tried, for a full report."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

from ddp_equivalence.report.line import Line, labelled
from ddp_equivalence.report.wrapping import plural

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


def trial_lines(verdict: Verdict) -> list[Line]:
    """Each edit that repairs the step, and how many were tried; nothing if none was."""
    repairs = verdict.repairs
    if repairs.why_not:
        return labelled("Tried: ", f"no edits of the step, because: {repairs.why_not}")
    if not repairs.tried:
        return []
    noun = plural(repairs.of, "small edit", "small edits")
    of = "" if repairs.tried == repairs.of else f" of {repairs.of}"
    count = f"{repairs.tried}{of} {noun} of the lines that the step runs"
    if not repairs.found:
        return labelled("Tried: ", f"{count}; none of them was seen to repair it.")
    repair = plural(repairs.right, "of them repairs it", "of them repair it, such as")
    lines = labelled("Tried: ", f"{count}; {repairs.right} {repair}:")
    for one in repairs.found:
        place = f"{os.path.basename(one.line.file)}:{one.line.number}"
        lines += labelled(f"  {place}: ", one.text)
    return lines
