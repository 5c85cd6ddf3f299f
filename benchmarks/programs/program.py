"""What a program is, and how the files in ``right/`` and ``wrong/`` list theirs.

A program is what a user writes: a model, a batch, a loss and a training step. Most files write only
one of them for each program, with a decorator above it, and take the others from ``common.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from benchmarks.programs.common import UnderDdp, mean_squared_error, mlp, regression
from ddp_equivalence import Case
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.measurement.request import CheckOptions
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.report.verdict import Outcome

LAYOUTS = ("1x2", "1x3", "2x2")
"""A program that names no layout runs on one of these. The length of its name says on which."""

Written = TypeVar("Written", bound=Callable[..., Any])
"""What stands below a decorator: a step, a model (a class or a builder) or a loss."""


@dataclass(frozen=True)
class Program:
    """A program, and the outcome that was declared for it before it was run.

    ``right``: it trains like one big batch. ``sentence``: what it does; for a wrong program, what
    is wrong with it. ``options``: what ``check`` takes beside case and step. ``causes``: the public
    names of causes each of which says rightly what is wrong; empty if none does, and None if only
    the outcome was declared.
    ``because``: why nothing can be shown, if ``expected`` is "unknown". ``rounds_in``: the
    precision in which the program rounds, if that is lower than the precision of its case.
    ``is_verified``: False if ``--verify`` cannot run it, because it reads in an order of its own,
    or leaves parts of the weights on each rank.
    """

    name: str
    topic: str
    right: bool
    sentence: str
    case: Case
    step: Step
    options: CheckOptions
    expected: Outcome
    causes: frozenset[str] | None = None
    because: UnknownBecause | None = None
    rounds_in: torch.dtype | None = None
    is_verified: bool = True


class Programs:
    """The programs of one file: the right or the wrong ones of a topic, in the file's order."""

    def __init__(self, topic: str, *, right: bool) -> None:
        self.topic, self.right = topic, right
        self.all: list[Program] = []

    def step(self, **fields: Any) -> Callable[[Written], Written]:
        """Add a program for the step below; ``fields`` are of its case, of ``check`` or both.

        The name of the function becomes the name of the program, and its docstring the sentence.
        ``unknown``: why nothing can be shown, if that is expected; ``causes``, ``rounds_in``: see
        ``Program``.
        """
        return lambda step: self._add(step, step=step, **fields)

    def model(self, **fields: Any) -> Callable[[Written], Written]:
        """Add a program for the model below; its step is plain DDP unless ``fields`` have one."""
        return lambda model: self._add(model, model=model, **fields)

    def loss(self, **fields: Any) -> Callable[[Written], Written]:
        """Add a program for the loss below; its step is plain DDP unless ``fields`` have one."""
        return lambda loss: self._add(loss, loss=loss, **fields)

    def add(self, name: str, sentence: str, **fields: Any) -> None:
        """Add a program that is made of ``fields``, which are those of ``step``."""
        causes = fields.pop("causes", None)
        because, rounds_in = fields.pop("unknown", None), fields.pop("rounds_in", None)
        is_verified = fields.pop("is_verified", True)
        options = {key: fields.pop(key) for key in CheckOptions.__annotations__ if key in fields}
        loss = fields.setdefault("loss", mean_squared_error)
        step = fields.pop("step", None) or UnderDdp(loss)
        layout = LAYOUTS[len(name) % len(LAYOUTS)]
        defaults: dict[str, Any] = {"model": mlp, "batch": regression, "layout": layout}
        settled: Outcome = "same" if self.right else "different"
        self.all.append(
            Program(
                name=name,
                topic=self.topic,
                right=self.right,
                sentence=sentence,
                case=Case(**(defaults | fields)),
                step=step,
                options=cast(CheckOptions, options),
                expected="unknown" if because else settled,
                causes=None if causes is None else frozenset(causes),
                because=because,
                rounds_in=rounds_in,
                is_verified=is_verified,
            )
        )

    def _add(self, written: Written, **fields: Any) -> Written:
        sentence = " ".join((written.__doc__ or "").split())
        self.add(spelled(written.__name__), sentence, **fields)
        return written


def all_programs() -> list[Program]:
    """All programs: first the right ones, then the wrong ones, file by file."""
    found: list[Program] = []
    with warnings.catch_warnings():
        # torch.distributed.optim uses torch.jit, which torch itself calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        for side in ("right", "wrong"):
            for file in sorted((Path(__file__).parent / side).glob("*.py")):
                found += import_module(f"benchmarks.programs.{side}.{file.stem}").programs.all
    return found


def spelled(name: str) -> str:
    """``TiedWeights`` as ``tied_weights``; a name of a function stays as it is."""
    parts = (f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return "".join(parts).removeprefix("_")
