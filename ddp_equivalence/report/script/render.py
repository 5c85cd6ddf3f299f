"""Write a script: docstring, imports, constants, definitions, and the call of its main function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from ddp_equivalence.report.script.slicing.contents import Contents, Fragment
from ddp_equivalence.report.script.slicing.no_source import NoSource
from ddp_equivalence.report.script.slicing.sliceable import PACKAGE, TEMPLATE, is_own_module
from ddp_equivalence.report.script.slicing.source_module import SourceModule
from ddp_equivalence.report.script.unused_read import without_unused_read

TOOL_COMMENTS = re.compile(r"[ ]{2}# (type: ignore|noqa).*$", re.MULTILINE)

COMPARING_MODULES = (
    f"{TEMPLATE}.catalogue_step",
    f"{PACKAGE}.case.batch_tree",
    f"{PACKAGE}.case.batch",
    f"{PACKAGE}.case.precision",
    f"{TEMPLATE}.plain_batch",
    f"{TEMPLATE}.dealt_batch",
    f"{PACKAGE}.comparison.gradients",
    *(
        f"{TEMPLATE}.{name}"
        for name in (
            *("start_from_seed", "start_from_integers", "process_group", "own_names", "one_step"),
            *("several_steps", "update_by_step", "update_by_trainer", "comparison", "main"),
        )
    ),
)
"""Modules that run and compare, in the order of the script. They stand below what they compare."""


def render(contents: Contents, docstring: str) -> str:
    """The text of the script. Raises NoSource if it would still import this package."""
    modules = _by_dependencies(contents)
    annotated = {
        fragment.module.source.file
        for fragment in contents.fragments.values()
        if fragment.annotation_removals
    }
    users = [each for each in modules if not each.is_own and each.source.file in annotated]
    postponed = bool(users) and all(each.source.postpones_annotations for each in users)
    # A script that evaluates annotations leaves out those that were written to be postponed: they
    # may use names that are not defined yet.
    unannotated = {
        each.source.file for each in users if each.source.postpones_annotations and not postponed
    }
    compared: list[str] = []
    comparing: list[str] = []
    for module in sorted(modules, key=_section):
        texts = comparing if _section(module) else compared
        for (file, *_), fragment in sorted(contents.fragments.items(), key=lambda item: item[0]):
            if file == module.source.file:
                texts.append(_text(fragment, file in unannotated))
    parts = [
        f'"""{docstring}"""',
        *(["from __future__ import annotations"] if postponed else []),
        *contents.imports.blocks(),
        "\n".join(f"{name} = {text}" for name, text in contents.constants.items()),
        *_blocks(compared),
        "\n".join(f"{name} = {text}" for name, text in contents.assignments.items()),
        *_blocks(comparing),
        f'if __name__ == "__main__":\n    {contents.main}()',
    ]
    script = without_unused_read(_joined(part for part in parts if part))
    _check_imports(script)
    return script


def _section(module: SourceModule) -> int:
    """0 for a module that is compared; else its place among the modules that run and compare."""
    name = module.name
    return COMPARING_MODULES.index(name) + 1 if name in COMPARING_MODULES else 0


def _text(fragment: Fragment, unannotated: bool) -> str:
    edits = fragment.edits + (fragment.annotation_removals if unannotated else [])
    text = fragment.finish(fragment.module.source.edited(fragment.span, edits))
    return TOOL_COMMENTS.sub("", text) if fragment.module.is_own else text


def _by_dependencies(contents: Contents) -> list[SourceModule]:
    """Every module after those that it takes names from."""
    ordered: list[str] = []
    visited: set[str] = set()

    def visit(file: str) -> None:
        if file in visited:
            return
        visited.add(file)
        for dependency in sorted(contents.dependencies.get(file, ())):
            visit(dependency)
        ordered.append(file)

    for file in contents.modules:
        visit(file)
    return [contents.modules[file] for file in ordered if file in contents.modules]


def _blocks(texts: Sequence[str]) -> list[str]:
    """Statements of one line that follow each other form one block."""
    blocks: list[str] = []
    after_line = False
    for text in map(str.strip, texts):
        is_line = "\n" not in text and not text.startswith(("def ", "class "))
        if is_line and after_line:
            blocks[-1] += f"\n{text}"
        else:
            blocks.append(text)
        after_line = is_line
    return blocks


def _joined(parts: Iterable[str]) -> str:
    """Two empty lines around definitions, one between other parts."""
    text = ""
    for part in parts:
        definition = part.startswith(("def ", "class ", "@", "async def ", "if __name__"))
        last_part = text.rpartition("\n\n\n")[2]
        after_definition = re.search(r"^(def|class|@|async def) ?", last_part) is not None
        gap = "\n\n\n" if definition or after_definition else "\n\n"
        text += (gap if text else "") + part
    return f"{text}\n"


def _check_imports(script: str) -> None:
    for node in ast.walk(ast.parse(script)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        if any(map(is_own_module, modules)):
            line = getattr(node, "lineno", 0)
            raise NoSource(f"line {line} would import {PACKAGE}: {ast.unparse(node)}")
