"""Which lines of the user's code a rank has run, how often, and in which order."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from ddp_equivalence.diagnosis.lines.source_tree import LOOPS, Function, Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine

WITHOUT_CODE = (ast.AnnAssign, ast.Global, ast.Nonlocal)
"""Statements that may leave no code, so that no line of theirs ever runs."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class RunLines:
    """``times``: each line that has run -> how often it began, in all steps. ``last``: -> a number
    that says in which order they ran last. ``backwards``: the lines that called backward.
    """

    times: Mapping[CodeLine, int]
    last: Mapping[CodeLine, int]
    backwards: tuple[CodeLine, ...] = ()

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files of the user's code that ran."""
        return tuple(dict.fromkeys(line.file for line in self.times))

    def beside_backward(self, place: Place) -> Place:
        """The place without the statements around it that also hold a call of backward: these do
        not decide about single gradients.
        """
        numbers = [line.number for line in self.backwards if line.file == place.file]
        inner = takewhile(
            lambda one: (
                not any(
                    one.statement.lineno <= number <= (one.statement.end_lineno or 0)
                    for number in numbers
                )
            ),
            place.around,
        )
        return replace(place, around=tuple(inner))

    def count(self, place: Place, node: ast.AST) -> int:
        """How often the line began at which a part of this function begins."""
        return self.times.get(place.line(node), 0)

    def exact_count(self, place: Place, node: ast.AST) -> int | None:
        """The same number; None for a line that may begin several times in one run of the node.

        Python comes back to the first line of a statement that goes over several lines, of a
        ``with`` at its end, and, from 3.12 on, in comprehensions.
        """
        parts = [node.test] if isinstance(node, (ast.If, ast.While)) else [node]
        if isinstance(node, (ast.For, ast.AsyncFor)):
            parts = [node.target, node.iter]
        for part in parts:
            end = getattr(part, "end_lineno", None)
            if end != getattr(node, "lineno", 0) or isinstance(part, (ast.With, ast.AsyncWith)):
                return None
            if any(isinstance(one, COMPREHENSIONS) for one in ast.walk(part)):
                return None
        return self.count(place, node)

    def has_begun(self, place: Place, body: Sequence[ast.stmt]) -> bool:
        """True if a line of a block of this function has run."""
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        name = place.line(body[0]).function
        return any(
            line.file == place.file and line.function == name and first <= line.number <= last
            for line in self.times
        )

    def times_begun(self, place: Place, body: Sequence[ast.stmt]) -> int | None:
        """How often a block of this function began; None if that is not certain."""
        first = body[0] if body else None
        while isinstance(first, (ast.With, ast.AsyncWith, ast.Try)):
            first = first.body[0]
        if first is None or isinstance(first, (*LOOPS, *WITHOUT_CODE)):
            return None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return None
        return self.exact_count(place, first)

    def has_run(self, file: str, function: Function) -> bool:
        """True if a line of the body of this function has run."""
        return bool(self.last_of(file, function))

    def last_of(self, file: str, function: Function) -> int:
        """When a line of the body of this function ran last; 0 if none has."""
        first, last = function.body[0].lineno, function.end_lineno or function.lineno
        return max(
            (
                number
                for line, number in self.last.items()
                if line.file == file
                and line.function == function.name
                and first <= line.number <= last
            ),
            default=0,
        )


def run_lines(view: View, rank: int) -> RunLines:
    """The lines that a rank has run; none if they were not recorded."""
    seen = view.observed.by_rank.get(rank)
    if seen is None:
        return RunLines({}, {})
    backwards = tuple(place.line for place in view.observed.calls.backwards)
    return RunLines(seen.trace.times_run or {}, seen.trace.lines_run or {}, backwards)
