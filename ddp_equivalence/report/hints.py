"""What a user can do about errors on the ranks that many users meet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.report.device_hints import device_hint
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
        "trying to initialize the default process group twice",
        "the step has called init_process_group twice. It may call it once, although the rank "
        "has a process group; to call it again, it must call destroy_process_group first",
    ),
    Hint(
        "Default process group has not been initialized",
        "the step has called destroy_process_group, and a collective after it. Move that call to "
        "the end, or leave it out: the ranks end their group themselves.",
    ),
    Hint(
        "BdbQuit|EOFError: EOF when reading a line",
        "this rank is a process of its own and has no terminal. With --in-process, or "
        "check(..., in_process=True), rank 0 is the process that you started, and a debugger works "
        "in it: if rank == 0: breakpoint()",
    ),
    Hint(
        "Can't pickle local object|Can't get local object",
        "worker processes that are started with spawn or forkserver can be sent no function or "
        "class that is defined inside a function. A training script would fail in the same way. "
        "Define it at the top of its file, or start the workers with fork.",
    ),
)
"""The first hint whose pattern is found is printed."""


def hint_lines(what: str, lane: Lane | None = None) -> list[Line]:
    """The hint for an exception, whose type and text are given; nothing if there is none.

    ``lane``: the lane of the rank that raised it, if it is known.
    """
    sentences = (hint.sentence for hint in HINTS if re.search(hint.pattern, what))
    sentence = next(sentences, "") or (device_hint(what, lane) if lane is not None else "")
    return paragraph(f"Hint: {sentence}", "    ") if sentence else []
