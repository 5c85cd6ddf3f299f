"""Put the pieces of a script together: docstring, imports, constants, definitions, main."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence

from ddp_equivalence.report.script.literals import NoSource
from ddp_equivalence.report.script.origin import PACKAGE, Origin
from ddp_equivalence.report.script.slicer import Piece, Slicer

FOR_TOOLS = re.compile(r"[ ]{2}# (type: ignore|noqa).*$", re.MULTILINE)


def render(slicer: Slicer, docstring: str) -> str:
    """The text of the script. Raises NoSource if it would still need this package."""
    origins = _in_order(slicer)
    annotated = {one.origin.source.file for one in slicer.pieces.values() if one.types}
    users = [one for one in origins if not one.of_package and one.source.file in annotated]
    as_text = bool(users) and all(one.source.annotations_are_text for one in users)
    # Annotations that were text where they were written may name what is not there yet.
    strip = {one.source.file for one in users if one.source.annotations_are_text and not as_text}
    first: list[str] = []
    last: list[str] = []
    for origin in sorted(origins, key=_place):
        file = origin.source.file
        own = [one for key, one in sorted(slicer.pieces.items()) if key[0] == file]
        (last if _place(origin) else first).extend(_text(one, file in strip) for one in own)
    parts = [
        f'"""{docstring}"""',
        *(["from __future__ import annotations"] if as_text else []),
        *slicer.imports.lines(),
        "\n".join(f"{name} = {text}" for name, text in slicer.constants.items()),
        *_definitions(first),
        "\n".join(f"{name} = {text}" for name, text in slicer.glue.items()),
        *_definitions(last),
        f'if __name__ == "__main__":\n    {slicer.main}()',
    ]
    script = _joined(part for part in parts if part)
    _check(script)
    return script


RUNNING = (
    *("strategy", "building", "gradients", "fresh", "whole_numbers", "start", "one_step"),
    *("several_steps", "update_by_step", "update", "comparison", "main"),
)
"""What runs and compares comes below what is compared, in this order."""


def _place(origin: Origin) -> int:
    name = origin.module.rpartition(".")[2]
    running = origin.of_skeleton or origin.module in (f"{PACKAGE}.building", f"{PACKAGE}.gradients")
    return RUNNING.index(name) + 1 if running and name in RUNNING else 0


def _text(piece: Piece, without_types: bool) -> str:
    edits = piece.edits + (piece.types if without_types else [])
    text = piece.finish(piece.origin.source.edited(piece.span, edits))
    return FOR_TOOLS.sub("", text) if piece.origin.of_package else text


def _in_order(slicer: Slicer) -> list[Origin]:
    """A module after those that it takes names from."""
    done: list[str] = []
    entered: set[str] = set()

    def visit(file: str) -> None:
        if file in entered:
            return
        entered.add(file)
        for other in sorted(slicer.follows.get(file, ())):
            visit(other)
        done.append(file)

    for file in slicer.origins:
        visit(file)
    return [slicer.origins[file] for file in done if file in slicer.origins]


def _definitions(texts: Sequence[str]) -> list[str]:
    """Constants that stand together stay together."""
    parts: list[str] = []
    after_small = False
    for text in map(str.strip, texts):
        small = "\n" not in text and not text.startswith(("def ", "class "))
        if small and after_small:
            parts[-1] += f"\n{text}"
        else:
            parts.append(text)
        after_small = small
    return parts


def _joined(parts: Iterable[str]) -> str:
    text = ""
    for part in parts:
        block = part.startswith(("def ", "class ", "@", "async def ", "if __name__"))
        after = re.search(r"^(def|class|@|async def) ?", text.rpartition("\n\n\n")[2]) is not None
        gap = "\n\n\n" if text and (block or after) else "\n\n" if text else ""
        text += gap + part
    return f"{text}\n"


def _check(script: str) -> None:
    for node in ast.walk(ast.parse(script)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        if any(one.split(".")[0] == PACKAGE for one in modules):
            raise NoSource(f"line {node.lineno} would import {PACKAGE}: {ast.unparse(node)}")  # type: ignore[attr-defined]


def wrapped(text: str, width: int = 96) -> str:
    """A paragraph of the docstring; nothing in it ends the docstring or escapes a letter."""
    text = text.replace("\\", "/").replace('"""', "'''")
    return "\n".join(textwrap.wrap(text, width)).rstrip('"')
