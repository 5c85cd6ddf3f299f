"""All small edits of some lines of a file that may repair a step."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ddp_equivalence.diagnosis.repairs.patterns import Pattern, same
from ddp_equivalence.diagnosis.repairs.source import Function, Scope, Site, SourceFile, Values
from ddp_equivalence.diagnosis.repairs.table import MISTAKES, Mistake
from ddp_equivalence.measurement.edited_code import EditedCode

WANTED = re.compile(r"clip_grad\w*|dropout\w*|penalt\w*|regulari\w*|weight_decay", re.IGNORECASE)
"""Names of what is in a step because somebody wants it, whatever gradients it leaves."""


@dataclass(frozen=True)
class Edit:
    """One small change of a user's source file.

    line: where the expression or statement that is changed begins, from 1
    place: the place of the mistake in the table, from 0
    before, after: the smallest part that is changed, on one line for each statement
    code: the statement of the module in which it stands, as it was and as it becomes
    """

    line: int
    place: int
    before: str
    after: str
    code: EditedCode

    @property
    def mistake(self) -> Mistake:
        """The mistake that this repairs."""
        return MISTAKES[self.place]


def edits_of(
    file: str, source: str, lines: Collection[int], values: Values | None = None
) -> list[Edit]:
    """All edits of expressions and statements that begin on one of these lines.

    Each gives other syntax that compiles, and no two give the same. They are ordered by line, and
    those of a line as in the table: the most likely first.

    ``values`` says what the local names of functions held in a run: for the first line of a
    function, each name with a description of its value, such as "tensor float 3x4" or "int". A
    name is then exchanged only for another with the same description.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of code that an edit makes strange
        try:
            parsed = SourceFile(file, source)
        except (SyntaxError, ValueError):
            return []  # what was run is not what the file holds now
        first: dict[str, Edit] = {}
        proposed = _proposed(parsed, lines, values or {})
        for edit in sorted(proposed, key=lambda one: (one.line, one.place)):
            first.setdefault(ast.dump(edit.code.after), edit)
        return list(first.values())


def _proposed(source: SourceFile, lines: Collection[int], values: Values) -> Iterator[Edit]:
    scopes: dict[ast.AST | None, Scope] = {}
    for node in editable_nodes(source.tree):
        span = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if is_stored or not any(line in lines for line in span):
            continue
        around = source.nearest(node, *_SCOPES)
        if around not in scopes:
            scopes[around] = Scope(node, source, values)
        site = Site(node, source, scopes[around])
        for place, pattern in _patterns_for(type(node).__name__):
            for old, text in pattern.changes(site):
                edit = _edit(site, place, old, text)
                if edit is not None and edit.line in lines:
                    yield edit


_SCOPES: tuple[type[ast.AST], ...] = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


@cache
def _patterns_for(kind: str) -> list[tuple[int, Pattern]]:
    """The patterns that nodes of this type can match, with the places of their mistakes."""
    return [
        (place, pattern)
        for place, mistake in enumerate(MISTAKES)
        for pattern in mistake.patterns
        if issubclass(getattr(ast, kind), pattern.root)
    ]


def _edit(site: Site, place: int, old: Sequence[ast.AST], text: str) -> Edit | None:
    """The edit that puts a text in place of nodes; None if it changes nothing, or breaks code."""
    try:
        new = _nodes(text, like=old[0])
        top = site.source.top(site.node)
        after = ast.Module([site.source.replaced(old, new, top)], [])
        compile(after, site.source.file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    if same([*old], [*new]):
        return None
    (first, *_), _ = _smallest(old[:1], new[:1]) if not same(old[0], new[0]) else (old[-1:], new)
    before, changed = ("; ".join(map(ast.unparse, nodes)) for nodes in _smallest(old, new))
    if Counter(WANTED.findall(before)) - Counter(WANTED.findall(changed)):
        return None  # it takes away what somebody wrote on purpose
    if "-" in changed and any(map(_is_minus_minus, ast.walk(after))):
        return None  # nobody writes this: the change undoes another one of the same kind
    code = EditedCode(site.source.file, ast.Module([top], []), after)
    return Edit(first.lineno, place, before, changed, code)  # type: ignore[attr-defined]


def _is_minus_minus(node: ast.AST) -> bool:
    match node:
        case ast.UnaryOp(ast.USub(), ast.UnaryOp(ast.USub())):
            return True
    return False


def _nodes(text: str, like: ast.AST) -> list[ast.AST]:
    """What a text says, in the place of a node."""
    nodes: list[ast.AST]
    if isinstance(like, ast.stmt):
        nodes = [*ast.parse(text).body]
    else:
        whole = ast.parse(f"_[{text}]" if isinstance(like, ast.Slice) else text, mode="eval").body
        is_slice = isinstance(like, ast.Slice) and isinstance(whole, ast.Subscript)
        nodes = [whole.slice if is_slice else whole]  # type: ignore[attr-defined]
    for node in nodes:
        ast.increment_lineno(node, like.lineno - 1)  # type: ignore[attr-defined]
    return nodes


def _smallest(
    old: Sequence[ast.AST], new: Sequence[ast.AST]
) -> tuple[Sequence[ast.AST], Sequence[ast.AST]]:
    """The smallest parts of two lists of nodes outside of which they are the same."""
    if len(old) != len(new):
        kept = 0
        while kept < min(len(old), len(new)) - 1 and same(old[kept], new[kept]):
            kept += 1
        return old[kept:], new[kept:]
    pairs = [pair for pair in zip(old, new, strict=True) if not same(*pair)]
    if len(pairs) != 1 or type(pairs[0][0]) is not type(pairs[0][1]):
        return [one for one, _ in pairs], [other for _, other in pairs]
    one, other = pairs[0]
    fields = [(getattr(one, name), getattr(other, name)) for name in one._fields]
    fields = [pair for pair in fields if not same(*pair)]
    if len(fields) == 1:
        inner, changed = (part if isinstance(part, list) else [part] for part in fields[0])
        stand_somewhere = all(hasattr(part, "lineno") for part in (*inner, *changed))
        are_statements = bool(inner) and isinstance(inner[0], ast.stmt)
        if inner and stand_somewhere and (are_statements or len(inner) == len(changed)):
            return _smallest(inner, changed)
    return [one], [other]


# Which nodes of a file may be edited: what computes something, and nothing that only says it.

_NEVER = (
    *(ast.JoinedStr, ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal),
    *(ast.pattern, ast.arguments, ast.operator, ast.cmpop, ast.expr_context),
)

_MESSAGES = {"print", "warn", "log", "debug", "info", "warning", "error", "exception", "critical"}


def editable_nodes(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """The nodes inside functions that may be edited, in the order of the file."""
    for child in _children(tree):
        if isinstance(child, _NEVER) or _only_says_something(child):
            continue
        if inside and not isinstance(child, Function | ast.ClassDef):
            yield child
        yield from editable_nodes(child, inside or isinstance(child, Function))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are run with it: no decorators, defaults or annotations."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield from node.body
        case ast.Lambda():
            yield node.body
        case ast.AnnAssign():
            yield from (part for part in (node.target, node.value) if part is not None)
        case _:
            yield from ast.iter_child_nodes(node)


def _only_says_something(node: ast.AST) -> bool:
    """True for a docstring, a message, and text that is put together."""
    match node:
        case (
            ast.Expr(value=ast.Constant()) | ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod())
        ):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in _MESSAGES
        case ast.Call(func=ast.Attribute(attr="format")):
            return True
    return False
