"""Writes a script: docstring, imports, constants, definitions, and its main function."""

from __future__ import annotations

import ast
import platform
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from ddp_equivalence.case.build import SubsetBuilder
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import APART, batch_seed, generator_seed
from ddp_equivalence.case.shards import OWN, Shards, split
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.slicing.contents import (
    PACKAGE,
    TEMPLATE,
    Contents,
    Fragment,
    NoSource,
    SourceModule,
    is_own_module,
)
from ddp_equivalence.report.script.slicing.names import indices_literal
from ddp_equivalence.report.script.template.process_group import join_process_group

# Write a script: docstring, imports, constants, definitions, and the call of its main function.

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


# The constants at the top of a script: everything about the case that is a number or a name.

BACKENDS = {
    "gloo_fallback": None,
    "nccl": None,
    "nccl_shared": None,
    "emulated": "gloo",
    "data_parallel": "gloo_cuda",
    "data_parallel_shared": "gloo_cuda",
}
"""Lane -> backend, where their names differ; None: the script chooses it when it starts."""


def case_constants(request: Request, batch_sizes: Sequence[int]) -> dict[str, str]:
    """The source of every constant, by its name in ``template/placeholders.py``.

    ``batch_sizes``: the examples in the big batch of every step.
    """
    case = request.case
    ranks = case.ranks
    shards = [split(case.shards, size, ranks.world_size) for size in batch_sizes]
    one_process = request.strategy is not None and request.strategy.one_process
    whole_batches = [Shards((tuple(range(size)),), size) for size in batch_sizes]
    backend = BACKENDS.get(request.lane.name, request.lane.name)
    model = MODELS.get(case.model) if isinstance(case.model, str) else None
    ranks_of_node = [ranks.ranks_on(node) for node in range(ranks.nodes)]
    return {
        "NODE_OF_RANK": "(0,)" if one_process else repr(tuple(row.node for row in ranks.rows)),
        "BACKEND": repr(backend) + ("" if backend else "  # NCCL if there are GPUs, else gloo"),
        "SEED": repr(case.seed),
        "SEED_DISTANCE": f"{APART if request.seeds == 'apart' else 0}  # between two ranks",
        "BATCH_SEED": repr(batch_seed(case.seed)),
        "GENERATOR_SEED": repr(generator_seed(case.seed)),
        "DTYPE": str(case.dtype),
        "TOLERANCE": "0.0  # bit for bit" if case.exact else "1.0",
        "LEARNING_RATE": repr(request.lr),
        "BIG_BATCHES": f"[{', '.join(_examples(case, batch_sizes))}]  # the examples of every step",
        "SHARDS": _shards(whole_batches if one_process else shards),
        "CASE_SHARDS": _shards(shards),
        "EXAMPLES": repr(sum(batch_sizes)),
        "OUTPUT_SIZE": repr(model.output_size if model else 0),
        "PADDED": repr(list(shards[0].indices[-1])),
        "UNUSED_PARAMETERS": repr(bool(model and model.unused_on_some_ranks)),
        "RANKS_OF_NODE": repr(ranks_of_node),
        "LOSS_NAME": repr(case.loss if isinstance(case.loss, str) else None),
    }


def _examples(case: Case, batch_sizes: Sequence[int]) -> list[str]:
    """The positions of every step's examples in what the batch builder returns."""
    starts = [sum(batch_sizes[:step]) for step in range(len(batch_sizes))]
    of_steps = [range(start, start + size) for start, size in zip(starts, batch_sizes, strict=True)]
    if isinstance(case.batch, SubsetBuilder):
        taken = case.batch.positions
        return [indices_literal(taken[one.start : one.stop]) for one in of_steps]
    return list(map(str, of_steps))


def _shards(of_steps: list[Shards]) -> str:
    rows = [f"[{', '.join(map(indices_literal, shards.indices))}]" for shards in of_steps]
    return f"[{', '.join(rows)}]  # the examples of every rank, in every step"


# The docstring of a script: what it compares, and how to run it.


def docstring(request: Request, file: str, headline: str, contents: Contents) -> str:
    """The text of the docstring. ``file``: the name of the script's file."""
    case, step = request.case, name_of(request.step)
    measured = "change of the weights" if request.compare == "update" else "gradients"
    shards = "the whole batch on every rank" if case.shards == OWN else f"shards {case.shards}"
    paragraphs = [
        _paragraph(headline or f"{step} compared with one big batch"),
        _paragraph(
            f"This script compares the {measured} that {step} leaves on every rank with the "
            f"{measured} of one big batch on one device in float64. It prints the relative error "
            "and the ratio of norms for every parameter and rank. Exit code 0: same, 1: different."
        ),
        f"    {_torchrun_command(request, file)}",
        _paragraph(
            f"Layout {case.layout} (nodes are simulated on one host), {shards}, "
            f"{case.dtype_name}, seed {case.seed}. Written with torch {torch.__version__}, "
            f"Python {platform.python_version()}."
        ),
    ]
    if contents.local_files:
        files = ", ".join(sorted(contents.local_files))
        paragraphs.append(_paragraph(f"It imports files that are not installed packages: {files}."))
    if contents.files_using_their_path:
        files = ", ".join(sorted(contents.files_using_their_path))
        paragraphs.append(_paragraph(f"It may read files in the folder of {files}."))
    return "\n\n".join(paragraphs) + "\n"


def command_of(path: Path) -> str:
    """The command that runs a script that has been written, read from its docstring."""
    lines = path.read_text().splitlines()
    command = next(line for line in lines if line.startswith("    torchrun "))
    return command.strip().replace(path.name, shlex.quote(str(path)))


def _torchrun_command(request: Request, file: str) -> str:
    return f"torchrun --nproc-per-node {request.processes.world_size} {file}"


def _paragraph(text: str, width: int = 96) -> str:
    """Wrapped text without anything that would end the docstring or escape a character."""
    text = text.replace("\\", "/").replace('"""', "'''")
    return "\n".join(textwrap.wrap(text, width)).rstrip('"')


# Finds calls in a script that would start its process group again, or end it too early.

CALLS = ("init_process_group", "destroy_process_group")
CONDITION = "is_initialized"


def call_about_groups(script: str) -> str:
    """The first call of the step's own that starts or ends the group, as it is written; else "".

    A call below ``if not dist.is_initialized()`` is none: it does not take place in a script.
    """
    return next(_calls(ast.parse(script)), "")


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == join_process_group.__name__:
            continue
        if isinstance(node, ast.If) and CONDITION in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CALLS:
            yield ast.unparse(node)
        yield from _calls(node)


# Leaves ``Rank.read``, which is for checks alone, out of a script whose step does not call it.

LISTENERS = "heard_by"
"""The variable beside the class that the method uses."""


def without_unused_read(script: str) -> str:
    """The script without the method and its listeners, unless something reads an attribute so."""
    tree = ast.parse(script)
    name = Rank.read.__name__
    if any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree)):
        return script
    lines = script.splitlines(keepends=True)
    for node, after in reversed([*pairwise(tree.body)]):
        if isinstance(node, ast.ClassDef) and node.name == Rank.__name__:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    del lines[method.lineno - 2 : method.end_lineno]  # and the empty line above
        if _is_listeners(node):
            end = after if not _is_text(after) else tree.body[tree.body.index(after) + 1]
            del lines[node.lineno - 1 : _first_line(end) - 1]
    return "".join(lines)


def _is_listeners(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LISTENERS


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.stmt) -> int:
    """The first line of a statement, or of its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
