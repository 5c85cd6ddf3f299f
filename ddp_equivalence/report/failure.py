"""Ranks that failed, as text: who waited for whom, the root cause, and what a user can do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ddp_equivalence.case import settings
from ddp_equivalence.measurement.measure import Rerun
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.lanes import Lane, missing
from ddp_equivalence.report.text import Line, cut, paragraph, plural, rank_names

TRACEBACK_LINES = 30
CONSEQUENCE_LINES = 3
MOST_CONSEQUENCES = 7

NOT_COMPARED = "Not compared: {reason}. This says nothing about equivalence."
CHANGED = (
    "The gradients are those of the big batch, but {reason}. In a training run these changes would "
    "last, and the next test would meet them; here they were undone. If they are intended, say so: "
    "allow_changes=True, --ddp-allow-changes, or @pytest.mark.ddp(allow_changes=True)."
)

NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")

MOST_WIDTHS = 5
"""A message of torch is cut after this many times the width of the report."""


def failure_blocks(
    failure: RankFailed, reason: str, rerun: Rerun | None, lane: Lane | None = None
) -> Iterator[list[Line]]:
    """The failure as it is known, in blocks of lines. ``lane``: that of the ranks, if known."""
    changed = bool(failure.ends) and failure.ends[0].kind == "changed"
    yield [
        *paragraph((CHANGED if changed else NOT_COMPARED).format(reason=reason), "  "),
        *paragraph("" if failure.ends else str(failure), "  "),
        *paragraph(failure.waiting, "  "),
    ]
    failed = [end for end in failure.ends if end.failed]
    alike = _that_ended_alike(failed)
    for number, (end, *others) in enumerate(alike[: 1 + MOST_CONSEQUENCES]):
        role = "Root cause" if number == 0 else "Also" if changed else "Then"
        names = rank_names([other.rank for other in others])
        same = f"The same is true of {names}."
        if end.kind == "exception":
            alike_too = all(other.what == end.what for other in others)
            same = f"R{names[1:]} raised the same{'' if alike_too else ', with other numbers'}."
        yield [*_rank_end_lines(end, role, lane), *paragraph(same if others else "", "  ")]
    finished = [end.rank for end in failure.ends if not end.failed]
    more = sum(map(len, alike[1 + MOST_CONSEQUENCES :]))
    yield [
        *paragraph(f"Then: {more} more {plural(more, 'rank')}" if more else "", "  "),
        *paragraph(f"Finished its work: {rank_names(finished)}" if finished else "", "  "),
    ]
    if rerun is not None:
        yield _rerun_lines(rerun)


def _that_ended_alike(ends: Sequence[RankEnd]) -> list[list[RankEnd]]:
    """The ends, with those together that a reader could not tell apart but for their rank."""
    groups: dict[object, list[RankEnd]] = {}
    for end in ends:
        key: object = (end.kind, end.what, end.line, str(end.last))
        if end.kind == "exception":  # the message may have the rank or a number of its data
            key = (NUMBER.sub("0", end.what), end.line)
        groups.setdefault(key, []).append(end)
    return [sorted(group, key=lambda end: end.rank) for group in groups.values()]


def _rank_end_lines(end: RankEnd, role: str, lane: Lane | None) -> list[Line]:
    where = f"rank {end.rank} (node {end.node}, local rank {end.local_rank})"
    first, *more = end.what.splitlines() or [""]
    lines = paragraph(f"{role}: {where} {first}", "  ")
    if end.line:
        lines.append(Line(f"    at {end.line}"))
    if end.last is not None:
        called = f", called at {end.last.line}" if end.last.line not in ("", end.line) else ""
        lines.append(Line(f"    last collective: {end.last}{called}"))
    is_cause = role == "Root cause"
    lines += hint_lines(end.what, lane) if is_cause else []
    most = TRACEBACK_LINES if is_cause else CONSEQUENCE_LINES
    detail = end.detail.rstrip().splitlines()
    shown: list[str] = []
    if end.kind == "exception" and (detail or more):
        shown = (detail or more)[-most:]
    elif is_cause:
        shown = detail[:most]
    return [*lines, *(Line(f"    | {line}") for line in shown)]


def _rerun_lines(rerun: Rerun) -> list[Line]:
    title = f"Rerun on fresh ranks, TORCH_DISTRIBUTED_DEBUG=DETAIL, {rerun.seconds:.1f} s:"
    if rerun.failure is None:
        return paragraph(f"{title} the step did not fail again; all ranks finished.", "  ")
    outcome = "the step failed again."
    if not rerun.ranks_began:
        outcome = "the fresh ranks could not be started."
    elif rerun.cut_short:
        outcome = "the step was not done by the rerun's deadline either."
    first = _TENSOR_OPTIONS.sub("", str(rerun.failure).partition("\n")[0])
    return [
        *paragraph(f"{title} {outcome}", "  "),
        *paragraph(cut(first, MOST_WIDTHS * settings.current().width), "    "),
        *paragraph(rerun.failure.waiting, "    "),
    ]


_TENSOR_OPTIONS = re.compile(r", TensorDeviceTypes=TensorOptions\(.*?\(nullopt\)\)")
"""Torch adds this to each collective of a mismatch; it says nothing about the mismatch."""


# What a user can do about errors on the ranks that many users meet.

DTYPE = r"([Ff]loat(16|32|64)?|[Dd]ouble|[Hh]alf|BFloat16|bfloat16|c10::\w+)"

HINTS = (
    (
        rf"expected scalar type {DTYPE} but found {DTYPE}"
        rf"|[Ff]ound dtype {DTYPE} but expected {DTYPE}"
        r"|to have the same dtype, but got"
        r"|must have the same dtype"
        r"|source and destination dtypes match"
        r"|^RuntimeError: Input type \(.*\) and (weight|bias) type \(.*\) should be the same",
        "the case casts the model and the floats of the batch to its dtype, float64 by default. "
        "Give constants the dtype of the input, or choose Case(dtype=torch.float32).",
    ),
    (
        "trying to initialize the default process group twice",
        "the step has called init_process_group twice. It may call it once, although the rank "
        "has a process group; to call it again, it must call destroy_process_group first",
    ),
    (
        "Default process group has not been initialized",
        "the step has called destroy_process_group, and a collective after it. Move that call to "
        "the end, or leave it out: the ranks end their group themselves.",
    ),
    (
        "BdbQuit|EOFError: EOF when reading a line",
        "this rank is a process of its own and has no terminal. With --in-process, or "
        "check(..., in_process=True), rank 0 is the process that you started, and a debugger works "
        "in it: if rank == 0: breakpoint()",
    ),
    (
        "Can't pickle local object|Can't get local object",
        "worker processes that are started with spawn or forkserver can be sent no function or "
        "class that is defined inside a function. A training script would fail in the same way. "
        "Define it at the top of its file, or start the workers with fork.",
    ),
)
"""Regular expressions for the text of an exception, each with what is printed if it is found."""

NO_CUDA = (
    "No CUDA GPUs are available|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
    "|no CUDA-capable device is detected"
)
NO_SUCH_DEVICE = "(?i)invalid device ordinal|invalid device id"


def hint_lines(what: str, lane: Lane | None = None) -> list[Line]:
    """The first hint for an exception, whose type and text are given; nothing if there is none.

    ``lane``: the lane of the rank that raised it, if it is known.
    """
    sentences = [sentence for pattern, sentence in HINTS if re.search(pattern, what)]
    if lane is not None and lane.device_type == "cpu" and re.search(NO_CUDA, what):
        sentences.append(_without_gpus(lane))
    if lane is not None and lane.device_type == "cuda" and re.search(NO_SUCH_DEVICE, what):
        sentences.append(SHARED_GPU if lane.ranks_share_gpus else GPUS_OF_NODE)
    return paragraph(f"Hint: {sentences[0]}", "    ") if sentences else []


SHARED_GPU = (
    "there are fewer GPUs than ranks, so each rank sees a single GPU, which is its cuda:0. "
    "Move the model and the data to rank.device."
)
GPUS_OF_NODE = (
    "each rank sees only the GPUs of its own simulated node, as it would on a real one. "
    "Number them by LOCAL_RANK and not by RANK, or move the model and the data to rank.device."
)


def _without_gpus(lane: Lane) -> str:
    use = "move the model and the data to rank.device"
    if missing("gloo_cuda", 1) is not None:
        return f"torch can use no CUDA device of this machine, so the ranks are on the CPU: {use}."
    is_fallback = lane.name == "gloo_fallback"
    why = f"NCCL {lane.reason}" if is_fallback else f"the backend is {lane}"
    return (
        f"{why}, so the ranks ran on the CPU, with the GPUs hidden from them. Give this machine's "
        "GPUs to several ranks each with --backend gloo_cuda (in pytest --ddp-backend gloo_cuda, "
        f'in Python check(..., backend="gloo_cuda")), or {use}, which is the CPU here.'
    )
