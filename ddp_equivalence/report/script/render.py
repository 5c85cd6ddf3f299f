"""Fills the template of a script with a case and a step."""

from __future__ import annotations

import platform
import re
import symtable
import sys
import textwrap
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case.batch import dim_of, entries_by_example
from ddp_equivalence.case.batch_tree import leaves_of
from ddp_equivalence.case.build import SubsetBuilder, build_whole_batch
from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import APART, batch_seed, generator_seed
from ddp_equivalence.case.shards import OWN, Shards, split
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.report.script.values import PROVIDED, CarriedFiles, Expressions

TEMPLATE = files(__package__).joinpath("template.py").read_text()

SECTION = re.compile(r"^# \[(\w+)\n(.*?)^# \1\]\n", re.MULTILINE | re.DOTALL)

TOOL_COMMENTS = re.compile(r"  # (type: ignore|noqa).*$", re.MULTILINE)


def render(request: Request, file: str, headline: str) -> str:
    """The text of the script. Raises BadCase, which names the field that it cannot contain."""
    names = frozenset(symtable.symtable(TEMPLATE, "", "exec").get_identifiers())
    carried = CarriedFiles()
    bindings = _bindings(request, carried, Expressions(carried, names))
    kept = {
        "bindings": "\n".join(bindings) + "\n",
        "stand_ins": None if carried.stand_ins else "",
        "enclosed": None if any("_in(" in line for line in bindings) else "",
        "strategy": None if request.strategy else "",
    }

    def section(found: re.Match[str]) -> str:
        text = kept.get(found[1], found[0])
        return found[2] if text is None else text

    text = SECTION.sub(section, TEMPLATE.partition('"""\n')[2])
    text = re.sub(r"\n{4,}", "\n\n\n", TOOL_COMMENTS.sub("", text))
    # The constants contain the user's files, which stay as they are.
    text = SECTION.sub(lambda _: _constants(request, carried), text)
    return f'"""{_docstring(request, file, headline, carried)}"""\n{text}'


def _bindings(request: Request, files: CarriedFiles, values: Expressions) -> list[str]:
    """The statements that find the model, batch, loss and step in the files.

    Raises BadCase, which names the field, for a function that the script cannot contain.
    """
    case, lines, strategy = request.case, values.lines, request.strategy
    model = MODELS[case.model] if isinstance(case.model, str) else None
    loss = LOSSES[case.loss] if isinstance(case.loss, str) else None

    def bind(name: str, value: Any, field: str) -> None:
        try:
            lines.append(f"{name} = {values.of(value)}")
        except (ValueError, SyntaxError) as error:
            given = request.step if field == "step" else getattr(case, field)
            right = f"a function defined at the top level of a file; {error}, so no script can "
            raise BadCase(field, name_of(given), f"{right}contain it") from error

    bind("MODEL" if model else "build_model", model or case.model, "model")
    bind("LOSS" if loss else "loss", loss or case.loss, "loss")
    if model:
        lines.append("build_model = MODEL.build")
    if loss:
        lines.append("loss = LOSS.value")
    if case.batch is None:
        lines.append(_catalogue_batch(request))
    else:
        # BIG_BATCHES has the positions of a subset.
        builder = case.batch.builder if isinstance(case.batch, SubsetBuilder) else case.batch
        bind("make_batch", builder, "batch")
    bind("deal", case.batch_dims if callable(case.batch_dims) else None, "batch_dims")
    if strategy is None:
        bind("step", request.step, "step")
        return lines
    if loss:
        lines.append(f"LOSSES[{case.loss!r}] = LOSS")
    bind("STRATEGY", strategy, "step")
    return [*lines, "step = step_of_strategy"]


def _catalogue_batch(request: Request) -> str:
    sizes = build_whole_batch(request.case, request.steps)[1]
    padding = ""
    if request.case.shards == "no_valid_token":
        last = split(request.case.shards, sizes[0], request.case.ranks.world_size).indices[-1]
        padding = f"    targets[{list(last)}] = -100  # all targets of the last rank are padding\n"
    return (
        "\n\ndef make_batch(generator):\n"
        f"    inputs = MODEL.inputs(generator, {sum(sizes)})\n"
        "    targets = LOSS.targets(generator, inputs, MODEL)\n"
        f'{padding}    return {{"inputs": inputs, "targets": targets}}\n\n'
    )


# The constants at the top of a script: everything about the case that is a number or a name, and
# the files.

BACKENDS = {
    "gloo_fallback": None,
    "nccl": None,
    "nccl_shared": None,
    "emulated": "gloo",
    "data_parallel": "gloo_cuda",
    "data_parallel_shared": "gloo_cuda",
}
"""Lane -> backend, where their names differ; None: the script chooses it when it starts."""


def _constants(request: Request, carried: CarriedFiles) -> str:
    case, ranks = request.case, request.case.ranks
    whole, sizes = build_whole_batch(case, request.steps)
    shards = [split(case.shards, size, ranks.world_size) for size in sizes]
    alone = request.strategy is not None and request.strategy.one_process
    given = [Shards((tuple(range(size)),), size) for size in sizes] if alone else shards
    backend = BACKENDS.get(request.lane.name, request.lane.name)
    dims = case.batch_dims
    values: dict[str, object] = {
        "NODE_OF_RANK": (0,) if alone else tuple(row.node for row in ranks.rows),
        "BACKEND": f"{backend!r}" + ("" if backend else "  # NCCL if there are GPUs, else gloo"),
        "SEED": case.seed,
        "SEED_DISTANCE": f"{APART if request.seeds == 'apart' else 0}  # between two ranks",
        "BATCH_SEED": batch_seed(case.seed),
        "GENERATOR_SEED": generator_seed(case.seed),
        "DTYPE": case.dtype,
        "EXACT": f"{case.exact}  # small integers, compared bit for bit",
        "LEARNING_RATE": request.lr,
        "COMPARES_UPDATE": f"{request.compare == 'update'}  # else gradients",
        "STEP_TRAINS": f"{request.trains}  # it is called once, with the examples of all steps",
        "BATCH_DIM": dims if isinstance(dims, int) else 0,
        "BATCH_LEAVES": _leaves(whole, dims),
        "BIG_BATCHES": f"[{', '.join(_examples(case.batch, sizes))}]  # examples of every step",
        "SHARDS": f"{_shards(given)}  # the examples of every rank, in every step",
    }
    if request.strategy is not None:
        model = MODELS[case.model] if isinstance(case.model, str) else None
        values |= {
            "CASE_SHARDS": "SHARDS" if given is shards else _shards(shards),
            "CASE_RANKS_BY_NODE": [ranks.ranks_on(node) for node in range(ranks.nodes)],
            "UNUSED_PARAMETERS": bool(model and model.unused_on_some_ranks),
        }
    if carried.stand_ins:
        values["STANDS_FOR"] = tuple(sorted(carried.stand_ins))
        values["PROVIDED"] = tuple(sorted(PROVIDED)) if request.strategy else ("Case", "Rank")
    lines = [f"{name} = {value}" for name, value in values.items()]
    named = (f"    {name!r}: {_quoted(text)},\n" for name, text in carried.texts.items())
    return "\n".join(lines) + f"\n\nFILES = {{\n{''.join(named)}}}\n"


def _quoted(text: str) -> str:
    """The text, below an empty line, as a literal that shows it as it is, if there is one."""
    text = "\n" + text.rstrip("\n") + "\n"
    for quotes in ("'''", '"""'):
        if quotes not in text:
            return f"r{quotes}{text}{quotes}"
    escaped = text.replace("\\", "\\\\").replace("'''", "\\'\\'\\'")
    return f"'''{escaped}'''"


def _leaves(batch: Any, dims: Any) -> dict[str, int | None]:
    """The parts of the batch that are not dealt as ``BATCH_DIM`` says, by their paths.

    Raises BadCase for a path that is no Python expression.
    """
    found: dict[str, int | None] = {}
    if dims is None or isinstance(dims, int) or callable(dims):
        return found
    for path, leaf in leaves_of(batch, entries_by_example(dims)):
        dim = dim_of(path, leaf, dims)
        if dim != (0 if isinstance(leaf, Tensor) else None):
            if eval(f"batch{path}", {"batch": batch}) is not leaf:
                raise BadCase("batch_dims", path, "the path of a leaf as an expression of Python")
            found[path] = dim
    return found


def _examples(batch: Any, sizes: Sequence[int]) -> list[str]:
    """The positions of every step's examples in what the batch builder returns."""
    taken = batch.positions if isinstance(batch, SubsetBuilder) else tuple(range(sum(sizes)))
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    by_step = zip(starts, sizes, strict=True)
    return [_indices(taken[start : start + size]) for start, size in by_step]


def _shards(by_step: list[Shards]) -> str:
    rows = [f"[{', '.join(map(_indices, shards.indices))}]" for shards in by_step]
    return f"[{', '.join(rows)}]"


def _indices(indices: Sequence[int]) -> str:
    """``range(...)`` where the indices are evenly spaced, else the list of them."""
    if not indices:
        return "range(0)"
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step > 0 and (even := range(indices[0], indices[-1] + 1, step)) and [*even] == [*indices]:
        return str(even)
    return str([*indices])


# The docstring of a script: what it compares, and how to run it.


def _docstring(request: Request, file: str, headline: str, carried: CarriedFiles) -> str:
    case, step = request.case, name_of(request.step)
    measured = "change of the weights" if request.compare == "update" else "gradients"
    shards = "the whole batch on every rank" if case.shards == OWN else f"shards {case.shards}"
    needed = ", ".join(sorted({"numpy", "torch"} | carried.installed - sys.stdlib_module_names))
    notes = {
        "It imports files that are not installed packages": carried.not_carried,
        "Its files read files beside": carried.reading_beside,
    }
    paragraphs = [
        _paragraph(headline or f"{step} compared with one big batch"),
        _paragraph(
            f"This script compares the {measured} that {step} leaves on every rank with the "
            f"{measured} of one big batch on one device in float64, which are expected. It prints "
            "the relative error and the ratio of norms for every parameter and rank. Exit code 0: "
            "same, 1: different."
        ),
        f"    torchrun --nproc-per-node {request.processes.world_size} {file}",
        _paragraph(
            f"Layout {case.layout} (nodes are simulated on one host), {shards}, "
            f"{case.dtype_name}, seed {case.seed}. Written with torch {torch.__version__}, "
            f"Python {platform.python_version()}. It needs {needed}."
        ),
        *(_paragraph(f"{says}: {', '.join(sorted(of))}.") for says, of in notes.items() if of),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _paragraph(text: str, width: int = 96) -> str:
    """Wrapped text without anything that would end the docstring or escape a character."""
    text = text.replace("\\", "/").replace('"""', "'''")
    return "\n".join(textwrap.wrap(text, width)).rstrip('"')
