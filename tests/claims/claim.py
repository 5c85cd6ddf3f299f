"""The decorator that makes a test a claim of docs/claims.md.

The first paragraph of the test's docstring is what people say, and the second is the answer; both
are on the page. What follows explains the figures. The test adds these to ``table``, which is
written to figures.md, and asserts them. ``fails_when`` changes one rule that the answer
rests on; ``test_every_claim_can_fail.py`` checks that the claim fails then. ``sources.py`` says
where people say it.

    @claim("false", divide_by=2, fails_when=Change("gradients are only added", divide_by=1))
    def test_ddp_averages(table: Table, divide_by: int) -> None:
        '''Averaging makes the gradient too small.

        The mean of the ranks' means is the big batch's mean.

        Two ranks with four examples each are measured.
        '''
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_equivalence.comparison.digits import text_of
from tests.claims import page
from tests.claims.sources import SOURCES, Source


class Change:
    """A change of a rule: ``says`` describes it in words, and the arguments make it."""

    def __init__(self, says: str, **arguments: Any) -> None:
        self.says = says
        self.arguments = arguments


@dataclass
class Table:
    """The table of a claim in figures.md. Its figures must be the same in every run."""

    rows: list[Mapping[str, str]] = field(default_factory=list)

    def add_row(self, **cells: object) -> None:
        """Add a row of cells by column; an underscore in a column's name stands for a space."""
        self.rows.append({name.replace("_", " "): cell_text(cell) for name, cell in cells.items()})


@dataclass(frozen=True)
class Claim:
    """A test and its verdict: "true", "false", or "true when ...".

    ``name`` is that of the test, ``topic`` that of its module. ``arguments``: the arguments with
    which the test passes.
    """

    function: Callable[..., None]
    verdict: str
    fails_when: Change
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def topic(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    @property
    def statement(self) -> str:
        """What people say."""
        return self._text.partition("\n\n")[0].replace("\n", " ")

    @property
    def answer(self) -> str:
        """What is true, and why, in a few sentences."""
        return self._text.split("\n\n")[1]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where people say it."""
        return SOURCES[self.name]

    @property
    def _text(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")


def claim(
    verdict: str, *, fails_when: Change, **arguments: Any
) -> Callable[[Callable[..., None]], Any]:
    """Make a test a claim, which also fails if its section of the page shows other figures."""

    def decorate(function: Callable[..., None]) -> Callable[[], None]:
        made = Claim(function, verdict, fails_when, arguments)

        @functools.wraps(function)
        def test() -> None:
            table = Table()
            function(table, **arguments)
            page.check_or_write(made, table.rows)

        del test.__wrapped__  # pytest would look for fixtures named like its arguments
        test.claim = made  # type: ignore[attr-defined]
        return test

    return decorate


def cell_text(value: object) -> str:
    """The text of a cell: four digits of a float, and 0 for a float that is only rounding."""
    if isinstance(value, float):
        return "0" if abs(value) < 1e-12 else text_of(value, ".4g")
    return str(value)
