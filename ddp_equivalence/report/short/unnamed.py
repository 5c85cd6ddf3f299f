"""A difference without a known cause: what is known about where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line
from ddp_equivalence.report.short.text import wrapped_lines

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

MOST_MODULES = 2
MOST_NAMES = 3


def unnamed_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """Where the difference lies, at most so many lines for each fact; nothing with a cause."""
    if verdict.causes:
        return []
    return [line for text in _where(verdict) for line in wrapped_lines(text, width, most)]


def _where(verdict: Verdict) -> Iterator[str]:
    localisation, wrong = verdict.localisation, verdict.wrong_step
    if wrong is not None and wrong.differs != "gradients":
        return  # the note says what is wrong, and nothing else is known
    yield from filter(None, (localisation.rows,))
    if localisation.whereabouts is not None:
        found = localisation.whereabouts
        texts = [" ".join(filter(None, (found.beside_one_rank, found.marks))), found.sentence]
        if verdict.repairs.shows_the_fault:  # the lines that these texts say are marked are not
            texts = [found.beside_one_rank]
        yield from filter(None, texts)
    by_module = (localisation.findings_by_module or {}).items()
    certain = [(module, one.cause) for module, one in by_module if not one.fitted]
    for module, cause in certain[:MOST_MODULES]:
        name = module or "the model itself"
        yield f"On the parameters of {name} alone, the numbers fit {cause}."
    yield from _weights(verdict)


def _weights(verdict: Verdict) -> Iterator[str]:
    """Says so if all that is wrong is a multiple of the weights: of a few, it may be chance."""
    multiples, comparison = verdict.localisation.weight_multiples, verdict.comparison
    assert comparison is not None
    differing = [one.name for one in comparison.differing]
    if not multiples or not differing or not multiples.keys() >= set(differing):
        return
    names = ", ".join(differing[:MOST_NAMES])
    more = ", ..." if len(differing) > MOST_NAMES else ""
    factors = ", ".join(dict.fromkeys(text_of(multiples[name], ".2g") for name in differing))
    error = f"The error of {names}{more} is {factors} times the weights"
    yield f"{error}: look at weight decay and penalties."
