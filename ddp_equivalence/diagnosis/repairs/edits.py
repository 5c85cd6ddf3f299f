"""All small edits of some lines of a file that may repair a step."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from ddp_equivalence.case.edit import Edit, EditKind
from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.editable import editable_nodes
from ddp_equivalence.diagnosis.repairs.file_facts import FileFacts
from ddp_equivalence.diagnosis.repairs.names_in_scope import Values, scope_of
from ddp_equivalence.diagnosis.repairs.rules import LIKELINESS, RULES
from ddp_equivalence.diagnosis.repairs.source import Source

WANTED = re.compile(r"clip_grad\w*|dropout\w*|penalt\w*|regulari\w*|weight_decay", re.IGNORECASE)
"""Names of what is in a step because somebody wants it, whatever gradients it leaves."""


def edits_of(
    file: str, source: str, lines: Collection[int], values: Values | None = None
) -> list[Edit]:
    """All edits of expressions and statements that begin on one of these lines.

    ``source`` is the file's bytes decoded as utf-8, with the line ends as they are. Each edit
    gives other syntax that compiles, and no two give the same. They are ordered by line, and
    those of a line as in the table of rules: the most likely first.

    ``values`` says what the local names of functions held in a run: for the line of a function's
    ``def``, each name with a description of its value, such as "tensor float 3x4" or "int". A
    name is then exchanged only for another with the same description.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of code that an edit makes strange
        try:
            parsed = Source(file, source)
        except (SyntaxError, ValueError):
            return []  # what was run is not what the file holds now
        parts = {top: _Part(parsed, top) for top in parsed.tree.body}
        proposed = sorted(_proposed(parsed, lines, values or {}), key=_by_line_and_likeliness)
        return [
            Edit(file, one.line, one.change.start, one.change.end, one.change.text, one.kind)
            for one in proposed
            if keeps_what_is_wanted(parsed, one.change) and parts[one.top].becomes_new(one.change)
        ]


def keeps_what_is_wanted(source: Source, change: Change) -> bool:
    """False for a change that takes away what somebody wrote on purpose, or puts it elsewhere."""
    before = Counter(WANTED.findall(source.between(change.start, change.end)))
    return not before - Counter(WANTED.findall(change.text))


@dataclass(frozen=True)
class _Proposed:
    """A change of what begins on a line, in one statement of the module."""

    line: int
    kind: EditKind
    change: Change
    top: ast.stmt


def _by_line_and_likeliness(proposed: _Proposed) -> tuple[int, int]:
    return proposed.line, LIKELINESS[proposed.kind]


def _proposed(source: Source, lines: Collection[int], values: Values) -> Iterator[_Proposed]:
    facts = FileFacts(source)
    for node in editable_nodes(source.tree):
        line: int = getattr(node, "lineno", 0)
        if line not in lines or isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        rules = [rule for rule in RULES if isinstance(node, rule.nodes)]
        scope = scope_of(node, source, values) if rules else None
        if scope is None:
            continue
        top = [one for one in (node, *source.parents_of(node)) if isinstance(one, ast.stmt)][-1]
        for rule in rules:
            for change in rule.changes(node, Place(source, facts, scope)):
                yield _Proposed(line, rule.kind, change, top)


class _Part:
    """One statement of the module. An edit in it is compiled without the rest of the file."""

    def __init__(self, source: Source, statement: ast.stmt) -> None:
        decorators = getattr(statement, "decorator_list", [])
        self._source = source
        first = source.span(decorators[0] if decorators else statement)[0]
        self._start = source.raw.rindex(b"@", 0, first) if decorators else first
        self._end = source.span(statement)[1]

    @cached_property
    def _seen(self) -> set[str]:
        return {ast.dump(ast.parse(self._source.between(self._start, self._end)))}

    def becomes_new(self, change: Change) -> bool:
        """True if the change gives syntax that compiles, and that was not seen before."""
        before = self._source.between(self._start, change.start)
        after = self._source.between(change.end, self._end)
        text = f"{before}{change.text}{after}"
        try:
            tree = ast.parse(text)
            compile(tree, self._source.file, "exec")
        except (SyntaxError, ValueError):
            return False
        dumped = ast.dump(tree)
        is_new = dumped not in self._seen
        self._seen.add(dumped)
        return is_new
