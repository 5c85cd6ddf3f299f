"""What a user can do about errors on the ranks that many users meet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_equivalence.report.line import Line, paragraph


@dataclass(frozen=True)
class Hint:
    """``pattern``: a regular expression that is found in the text of the exception."""

    pattern: str
    sentence: str


DTYPE = r"([Ff]loat(16|32|64)?|[Dd]ouble|[Hh]alf|BFloat16|bfloat16|c10::\w+)"

HINTS = (
    Hint(
        rf"expected scalar type {DTYPE} but found {DTYPE}"
        rf"|[Ff]ound dtype {DTYPE} but expected {DTYPE}"
        r"|to have the same dtype, but got"
        r"|must have the same dtype"
        r"|source and destination dtypes match"
        r"|^RuntimeError: Input type \(.*\) and (weight|bias) type \(.*\) should be the same",
        "the case casts the model and the floats of the batch to its dtype, float64 by default. "
        "Give constants the dtype of the input, or choose Case(dtype=torch.float32).",
    ),
    Hint(
        r"^TypeError: the step returned Tensor;",
        "a step leaves gradients: call backward() on the loss, and return nothing.",
    ),
)
"""The first hint whose pattern is found is printed."""


def hint_lines(what: str) -> list[Line]:
    """The hint for an exception, whose type and text are given; nothing if there is none."""
    for hint in HINTS:
        if re.search(hint.pattern, what):
            return paragraph(f"Hint: {hint.sentence}", "    ")
    return []
