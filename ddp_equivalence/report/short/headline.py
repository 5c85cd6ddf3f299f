"""The first line of a report: the step, where it stands, what is wrong, and the cause's name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, Style
from ddp_equivalence.report.short.definition import link_to, place_name
from ddp_equivalence.report.short.text import wrapped_lines

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.finding import Finding
    from ddp_equivalence.report.verdict import Verdict

END_OF_CLAUSE = re.compile(r"[,;:.](?= |$)| \(")

GAP = 2
"""Columns that stand at least between the sentence and the name."""


def headline_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """The headline; the name of the cause stands at the right, on a line of its own if it must.

    That there is no known cause is said only where there is room for it.

    ``most``: the lines that the sentence may take.
    """
    text, name = _sentence(verdict), _name(verdict)
    link = None if verdict.defined_at is None else link_to(verdict.defined_at)
    if len(text) + len(name) + GAP <= width:
        spaces = width - len(text) - len(name)
        lines = [f"{text}{' ' * spaces if name else ''}{name}"]
    else:
        lines = [line.text for line in wrapped_lines(text, width, most, "")]
        if len(lines[-1]) + len(name) + GAP <= width:
            lines[-1] += " " * (width - len(lines[-1]) - len(name)) + name
        elif verdict.causes:
            lines.append(name.rjust(width))
    first, *rest = lines
    return [Line(first, Style.BAD, link=link), *(Line(line, Style.BAD) for line in rest)]


def headline_text(verdict: Verdict) -> str:
    """The first line of the report, on one line whatever the width."""
    if verdict.outcome != "different":
        return str(verdict).partition("\n")[0]
    return f"{_sentence(verdict)}  {_name(verdict)}".rstrip()


def what_happened(finding: Finding) -> str:
    """The cause in a few words."""
    if finding.headline:
        return finding.headline
    clause = END_OF_CLAUSE.split(finding.sentence, maxsplit=1)[0]
    first_word = clause.partition(" ")[0]
    is_a_name = first_word[1:] != first_word[1:].lower()
    return clause if is_a_name else f"{clause[:1].lower()}{clause[1:]}"


def besides_text(finding: Finding) -> str:
    """The factor that the cause leaves, in a few words; "" without one."""
    return "" if finding.besides is None else f"{text_of(finding.besides, '.4g')} times besides"


def _sentence(verdict: Verdict) -> str:
    place = "" if verdict.defined_at is None else f" ({place_name(verdict.defined_at)})"
    return f"different: {verdict.subject}{place}: {_what(verdict)}"


def _what(verdict: Verdict) -> str:
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        if not verdict.tried_every_cause:
            return "no cause found, because not all known causes were tried"
        if verdict.comparison is not None and verdict.comparison.structure:
            return "names, shapes or types are not those of the big batch"
        if verdict.wrong_step is not None and verdict.wrong_step.differs != "gradients":
            return verdict.wrong_step.headline
        whereabouts = verdict.localisation.whereabouts
        seen = whereabouts is not None and whereabouts.kind != "not seen"
        if verdict.wrong_step is not None and not seen:
            return verdict.wrong_step.headline
        return whereabouts.headline if whereabouts is not None and seen else "no known cause fits"
    besides = "" if best.besides is None else f", and {besides_text(best)}"
    return ", and ".join(what_happened(one) for one in (best, *best.more)) + besides


def _name(verdict: Verdict) -> str:
    return f"[{' and '.join(verdict.causes) or 'no known cause'}]"
