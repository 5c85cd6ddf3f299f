"""A program that shows a cause, the fix that its report prints, and the program with this fix."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn

from ddp_equivalence import Case, Rank
from tests.diagnosis.names.small_case import case

Batch = dict[str, Tensor]
Step = Callable[[nn.Module, Any, Rank], Any]


@dataclass(frozen=True)
class Program:
    """``fix``: all fixes of its report, with a blank between two. ``edits``: what the fix says, as
    text of the step or of a helper -> what stands there afterwards. ``helpers``: functions of the
    step's module in which an edit stands. ``options``: of the check.
    """

    cause: str
    fix: str
    step: Step
    case: Case
    edits: Mapping[str, str]
    helpers: tuple[Callable[..., Any], ...] = ()
    options: Mapping[str, Any] | None = None

    def mended(self) -> Step:
        """The step with the fix applied."""
        source = "\n".join(map(_text_of, (self.step, *self.helpers)))
        for find, replace in self.edits.items():
            assert source.count(find) == 1, f"{source.count(find)} times: {find}"
            source = source.replace(find, replace)
        # A module that no rank can import, so that its functions are sent as they are.
        names = {
            **inspect.getmodule(self.step).__dict__,
            "__name__": "mended",
            "collectives": collectives,
        }
        exec(compile(source, "mended.py", "exec", dont_inherit=True), names)
        step: Step = names[self.step.__name__]
        return step


def _text_of(function: Callable[..., Any]) -> str:
    """The source of a function, without its decorators."""
    source = textwrap.dedent(inspect.getsource(function))
    first = ast.parse(source).body[0]
    assert isinstance(first, ast.FunctionDef | ast.ClassDef)
    lines = source.splitlines(keepends=True)[first.lineno - 1 :]
    return "".join(lines)


PROGRAMS: list[Program] = []


def shows(
    cause: str,
    fix: str,
    edits: Mapping[str, str],
    of: Case | None = None,
    *helpers: Callable[..., Any],
    **options: Any,
) -> Callable[[Step], Step]:
    """Add the function below to the programs."""

    def add(step: Step) -> Step:
        PROGRAMS.append(Program(cause, fix, step, of or case(), edits, helpers, options))
        return step

    return add


def with_labels(generator: torch.Generator) -> Batch:
    """Four labels for each row, of which 23 are known in all, and fewer in later rows."""
    labels = torch.randint(0, 3, (12, 4), generator=generator)
    for row, known in enumerate((4, 4, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1)):
        labels[row, known:] = -100
    return {"rows": torch.randn(12, 4, 5, generator=generator), "labels": labels}
