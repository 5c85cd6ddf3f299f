"""An embedding divides the gradient of a row by how often the row occurs in the batch that it sees.

Source: docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html, ``scale_grad_by_freq``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import suppress

from torch import nn

from ddp_equivalence.case.build import build_model
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import tree_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.code_lines import is_users

KEYWORD = "scale_grad_by_freq"


def fault_of_frequencies(view: View) -> Whereabouts | None:
    """None unless all parameters that differ are weights of such embeddings."""
    with without_planted_faults():
        model = build_model(view.setting.case)
    scaled = {
        name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq
        for name, _ in module.named_parameters(prefix)
    }
    names = [name for name in view.parameters.names if name in view.measured.differing]
    if not names or not scaled.issuperset(names):
        return None
    note = "divides by how often a row occurs in the batch that it sees: the rank's own"
    lines = [PointedLine(line, note, is_fault=True) for line in _lines(view)]
    return Whereabouts(
        kind="big batch",
        headline="an embedding counts rows on each rank alone",
        sentence=f"With {KEYWORD}, the gradient of {named(names)} depends on how often each row "
        "occurs in the rank's own batch.",
        lines=distinct(lines),
        parameters=tuple(names),
        ranks=tuple(view.setting.reporting_ranks),
        fix=f"leave out {KEYWORD}, or divide by the counts of all ranks.",
        explains_all=True,
    )


def _lines(view: View) -> Iterator[CodeLine]:
    """The calls in the user's files that switch this option on, or may do so."""
    files = list(run_lines(view, view.setting.reporting_ranks[0]).files)
    model = view.setting.case.model
    with suppress(TypeError):  # of an object that can be called
        files += [] if isinstance(model, str) else [inspect.getsourcefile(model) or ""]
    for file in filter(is_users, dict.fromkeys(files)):
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg == KEYWORD and not is_off:
                    yield CodeLine(file, keyword.lineno)
