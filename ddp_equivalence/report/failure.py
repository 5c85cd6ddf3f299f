"""Ranks that failed, as text: who waited for whom, the root cause, and what a user can do.

One screen says this; the whole report adds tracebacks, stacks and torch's texts as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import permutations

from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.measure import Rerun
from ddp_equivalence.ranks.ddp_errors import PLACE, About, DdpError
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.lanes import Lane, missing
from ddp_equivalence.report.blocks import Block, Code, Item, Listed, Sentences, place_name
from ddp_equivalence.report.text import Line, cut, listed, paragraph, plural, rank_names, ranks_by

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


# The screen.

MOST_NAMES = 4

OF_CPLUSPLUS = re.compile(
    r"\[[^\]\s]*( fail at )?\S+\.(cc|cpp|cu|h):\d+\] ?| at \"\S+\.(cc|cpp|cu|h)\":\d+"
    r"|, please report a bug to PyTorch\.|\s*Exception raised from [\s\S]*"
)
"""What torch's own authors need of its errors."""


def line_of(text: str) -> CodeLine | None:
    """The line of code that the end of a rank names; None if it names none."""
    found = PLACE.match(text)
    return None if found is None else CodeLine(found["file"], int(found["number"]))


def failure_screen(
    failure: RankFailed, reason: str, rerun: Rerun | None, lane: Lane | None
) -> list[Block]:
    """What failed where, and what to do, without the internals of torch."""
    if not failure.ends or failure.ends[0].kind == "changed":
        return [Block(lines) for lines in failure_blocks(failure, reason, rerun, lane)]
    root, *more = _that_ended_alike([end for end in failure.ends if end.failed])
    calls = _calls_that_differ(rerun)
    waiting = "The ranks do not call the same collective." if calls else failure.waiting
    first = root[0]
    where = f"rank {first.rank} (node {first.node}, local rank {first.local_rank})"
    then = [
        f"Then: {rank_names([end.rank for end in group])} {_what(group[0])}"
        for group in more
        if not group[0].waits or group[0].kind == "signal"
    ]
    items: list[Item] = []
    if not first.waits:  # else the sentence that says who waits for whom has said it
        items.append(Sentences(f"{where} {_what(first)}", "Root cause: ", "rows"))
    if first.about is not None:
        items.append(Sentences(_explained(first.about, failure.ends), limit="notes"))
    items += [
        Sentences("" if first.waits else _same(root)),
        Code(lambda most: _lines(failure, calls)[:most]),
    ]
    items += [Listed(then)]
    end: list[Item] = [Sentences(fix, "Fix: ", "fix") for fix in _fixes(failure, calls)]
    end += [Sentences("" if first.about is not None else hint(first.what, lane), "Hint: ", "notes")]
    if rerun is not None and rerun.failure is None:
        end.append(Sentences(_rerun_sentence(rerun)))
    is_clue = first.kind != "exception" and not calls
    printed = OF_CPLUSPLUS.sub("", first.output).split("\n") if is_clue else []
    if last := [line.strip() for line in printed if line.strip()][-1:]:
        end.append(Sentences(last[0], f"Rank {first.rank} printed last: "))
    elif any(one.output.strip() for one in failure.ends):
        end.append(Sentences("What the ranks printed is in the whole report."))
    return [
        Block([Sentences(NOT_COMPARED.format(reason=reason)), Sentences(waiting)], gap=2),
        Block(items),
        Block(end, gap=3),
    ]


def _what(end: RankEnd) -> str:
    """How the rank ended, without what the lines below it say, and without torch's internals."""
    text = OF_CPLUSPLUS.sub("", end.what).strip()
    if end.about is not None:
        text = re.split(r"[.](?= |$)|: \[", text)[0] + "."
    first, *others = [line for line in text.splitlines() if line.strip()] or [""]
    if any(line.startswith("Original Traceback") for line in others):
        return f"{others[-1]} (in a worker process of a DataLoader)"
    return " ".join(line.strip() for line in (first, *others))


def _lines(failure: RankFailed, calls: Sequence[tuple[RankEnd, str]]) -> list[PointedLine]:
    """The lines at which ranks call different collectives; otherwise those that the root cause is
    about, that at which it ended, and those at which ranks wait.
    """
    named = [(end.line, f"rank {end.rank} calls {call}") for end, call in calls]
    if not calls:
        root = failure.ends[0]
        about = root.about and (root.about.line, NOTES.get(root.about.about, ""))
        waiting = ranks_by((end.rank, end.line if end.waits else None) for end in failure.ends)
        named = [
            *([about] if about else []),
            *([] if root.waits else [(root.line, "")]),
            *(
                (line, f"{rank_names(sorted(on))} {plural(len(on), 'waits', 'wait')} here")
                for line, on in waiting.items()
            ),
        ]
    notes: dict[str, list[str]] = {}
    for text, note in named:
        notes.setdefault(text, []).extend([note] if note else [])
    fault = failure.ends[0].line
    return [
        PointedLine(line, "; ".join(notes[text]), is_fault=text == fault)
        for text in notes
        if (line := line_of(text)) is not None
    ]


MISMATCH = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+,? ?"
    r"OpType=(?P<op>\w+)(, TensorShape=(?P<shape>\[[\d, ]*\]), TensorDtypes=(?P<dtype>\w+))?"
)
"""What torch's detailed checks say of the rank that raises. What they say of the other one is often
wrong (torch 2.13).
"""


def _calls_that_differ(rerun: Rerun | None) -> list[tuple[RankEnd, str]]:
    """The ranks that torch's detailed checks have stopped, with the collectives that they call."""
    calls = []
    for end in () if rerun is None or rerun.failure is None else rerun.failure.ends:
        found = MISMATCH.search(end.what)
        if found is not None and int(found["rank"]) == end.rank:
            of = f" of {found['shape']} {found['dtype']}" if found["shape"] else ""
            calls.append((end, f"{found['op'].lower()}{of}"))
    return sorted(calls, key=lambda call: call[0].rank) if len(calls) > 1 else []


IN_DDP = re.compile(r"nn/parallel/distributed\.py|_engine_run_backward")


def _fixes(failure: RankFailed, calls: Sequence[tuple[RankEnd, str]]) -> Iterator[str]:
    """What the user can write instead."""
    first = failure.ends[0]
    if first.about is not None:
        line = line_of(first.about.line)
        at = "" if line is None else f" in {place_name(line)}"
        yield FIXES[first.about.about].format(at=at)
    waiting = [end for end in failure.ends if end.waits]
    if calls:
        yield SAME_ORDER
    elif first.waits and all(end.last is not None and not end.last.number for end in waiting):
        yield "let every recv meet a send of the other rank: one of two ranks sends first."
    elif first.waits and len(waiting) == len(failure.ends):
        yield SAME_ORDER
    elif first.waits:
        yield SAME_PASSES if IN_DDP.search(first.detail) else SAME_CALLS


SAME_ORDER = (
    "let all ranks call the same collectives in the same order, with tensors of equal shapes and "
    "dtypes."
)
SAME_PASSES = (
    "let all ranks make equally many forward and backward passes through DDP: as many batches on "
    "each, and no break, continue or return that only some ranks take."
)
SAME_CALLS = (
    "let every rank call it, or none: move it out of what only some ranks run, such as "
    "`if rank == 0`."
)


# What errors of DDP are about.


def _explained(error: DdpError, ends: Sequence[RankEnd]) -> str:
    if error.about is About.OTHER_MODEL:
        return _models_differ(error, ends)
    if error.about is About.UNUSED:
        unused = ranks_by(sorted((e.rank, e.about.names) for e in ends if e.about is not None))
        parts = (f"{listed(names, MOST_NAMES)} ({rank_names(on)})" for names, on in unused.items())
        return f"No gradient in the backward pass before: {'; '.join(parts)}. DDP waits for it."
    names = listed(error.names, MOST_NAMES)
    return EXPLANATIONS[error.about].format(names=names, module=error.module or "the model")


def _models_differ(error: DdpError, ends: Sequence[RankEnd]) -> str:
    """How the parameters of a rank differ from those of the first rank that is known."""
    known = sorted((end.rank, end.about.reduced) for end in ends if end.about is not None)
    (first, expected), *others = known
    for rank, reduced in others:
        for (one, its), (other, its_own) in permutations([(rank, reduced), (first, expected)]):
            if more := [name for name in its_own if name not in its]:
                names = listed(more, MOST_NAMES)
                return f"Rank {other} trains {names}, which rank {one} lacks or has frozen."
        for name in reduced:
            if reduced[name] != expected[name]:
                return (
                    f"{name} has the shape {_shape(expected[name])} on rank {first}, and "
                    f"{_shape(reduced[name])} on rank {rank}."
                )
    shapes = (f"{name} has the shape {_shape(error.reduced[name])}" for name in error.names)
    return "".join(f"{shape} on rank {first}, and another on rank 0." for shape in shapes)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "of a number"


EXPLANATIONS = {
    About.CHECKPOINTED: "DDP saw the gradient of {names} twice: the checkpoint of {module} runs a "
    "backward pass of its own (use_reentrant=True).",
    About.NESTED_BACKWARD: "DDP saw the gradient of {names} twice: a backward method runs a "
    "backward pass of its own through {module}.",
    About.SECOND_BACKWARD: "{names} got a gradient from a second backward pass, before every "
    "parameter had one from the first: {module} is behind both losses.",
    About.OUTSIDE_FORWARD: "Its last call did not use {names}, so DDP counts it as unused "
    "(find_unused_parameters=True). But the loss uses it: from an earlier call, outside forward, "
    "or through an output in which DDP finds no tensor.",
    About.WEIGHTS_CHANGED: "{names} was changed between the forward pass that used it and the "
    "backward pass.",
}

NOTES = {
    About.CHECKPOINTED: "checkpoints a part of the model",
    About.NESTED_BACKWARD: "a backward pass inside the backward pass",
    About.SECOND_BACKWARD: "calls backward as well",
    About.WEIGHTS_CHANGED: "an optimizer steps",
}

FIXES = {
    About.CHECKPOINTED: "checkpoint(..., use_reentrant=False){at}. Or, if all steps use the same "
    "parameters, DistributedDataParallel(..., static_graph=True).",
    About.NESTED_BACKWARD: "DistributedDataParallel(..., static_graph=True), if all steps use the "
    "same parameters.",
    About.SECOND_BACKWARD: "add the losses, and call backward() once.",
    About.OUTSIDE_FORWARD: "leave find_unused_parameters=True out, if every step uses all "
    "parameters; if all steps use the same ones, static_graph=True.",
    About.UNUSED: "DistributedDataParallel(..., find_unused_parameters=True). Or, before DDP, "
    "requires_grad_(False) for what no step uses.",
    About.WEIGHTS_CHANGED: "call backward() before the weights change{at}, and forward again for "
    "every later backward().",
    About.OTHER_MODEL: "build the same model on all ranks, and freeze the same parameters.",
}


# The whole report.


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
        yield [*_rank_end_lines(end, role, lane), *paragraph(_same([end, *others]), "  ")]
    if alike and not changed:
        about = alike[0][0].about
        advice = [f"Fix: {fix}" for fix in _fixes(failure, _calls_that_differ(rerun))]
        texts = [*([_explained(about, failure.ends)] if about else []), *advice]
        yield [line for text in texts for line in paragraph(text, "  ")]
    finished = [end.rank for end in failure.ends if not end.failed]
    more = sum(map(len, alike[1 + MOST_CONSEQUENCES :]))
    yield [
        *paragraph(f"Then: {more} more {plural(more, 'rank')}" if more else "", "  "),
        *paragraph(f"Finished its work: {rank_names(finished)}" if finished else "", "  "),
    ]
    if rerun is not None:
        yield _rerun_lines(rerun)


def _same(group: Sequence[RankEnd]) -> str:
    """Which ranks ended as the first one did."""
    end, *others = group
    names = rank_names([other.rank for other in others])
    if not others or end.kind != "exception":
        return f"The same is true of {names}." if others else ""
    alike_too = all(other.what == end.what for other in others)
    return f"R{names[1:]} raised the same{'' if alike_too else ', with other numbers'}."


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


def _rerun_sentence(rerun: Rerun) -> str:
    title = f"Rerun on fresh ranks, TORCH_DISTRIBUTED_DEBUG=DETAIL, {rerun.seconds:.1f} s:"
    if rerun.failure is None:
        return f"{title} the step did not fail again; all ranks finished."
    if not rerun.ranks_began:
        return f"{title} the fresh ranks could not be started."
    if rerun.cut_short:
        return f"{title} the step was not done by the rerun's deadline either."
    return f"{title} the step failed again."


def _rerun_lines(rerun: Rerun) -> list[Line]:
    lines = paragraph(_rerun_sentence(rerun), "  ")
    if rerun.failure is None:
        return lines
    first = _TENSOR_OPTIONS.sub("", str(rerun.failure).partition("\n")[0])
    return [
        *lines,
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
        "Your training graph has changed in this iteration",
        "leave static_graph=True out, since the steps use different parameters. "
        "find_unused_parameters=True allows that.",
    ),
    (
        "expect_autograd_hooks_ INTERNAL ASSERT",
        "with static_graph=True, DDP must reduce gradients in its first backward pass. Leave it "
        "out, or make the first pass without no_sync().",
    ),
    (
        "DistributedDataParallel device_ids and output_device arguments only work with",
        "leave device_ids out, since the model is on the CPU here. For CPUs and GPUs: "
        "device_ids=[rank.device] if rank.device.type == 'cuda' else None",
    ),
    (
        "SyncBatchNorm layers only work with GPU modules|SyncBatchNorm expected input tensor to be",
        "SyncBatchNorm needs GPUs. On the CPU leave batch norm as it is; each rank then takes the "
        "statistics of its own examples.",
    ),
    (
        "DistributedDataParallel is not needed when a module doesn't have any parameter",
        "call this module without DistributedDataParallel: all its parameters are frozen, so that "
        "there is nothing to reduce. If it is to be trained, unfreeze it before.",
    ),
    (
        "Distributed package doesn't have NCCL",
        "leave the backend out, or choose gloo: the ranks are on the CPU here.",
    ),
    (
        "Modules with uninitialized parameters can't be used with",
        "call the model once with an input before DistributedDataParallel wraps it.",
    ),
    (
        r"detach_\(\) cannot be called on these gradients",
        "set gradients to None, as optimizer.zero_grad() does, or leave out "
        "gradient_as_bucket_view=True.",
    ),
    (
        "leaf Variable that requires grad is being used in an in-place operation",
        "change weights inside `with torch.no_grad():`.",
    ),
    (
        "'DistributedDataParallel' object has no attribute",
        "attributes and methods are those of ddp.module. But call ddp itself, not ddp.module: only "
        "then are gradients reduced.",
    ),
    (
        "Trying to backward through the graph a second time",
        "add the losses, and call backward() once.",
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
    "|no CUDA-capable device is detected|has no attribute '_cuda_"
)
NO_SUCH_DEVICE = "(?i)invalid device ordinal|invalid device id"


def hint_lines(what: str, lane: Lane | None = None) -> list[Line]:
    """The hint in lines of the whole report; nothing if there is none."""
    sentence = hint(what, lane)
    return paragraph(f"Hint: {sentence}" if sentence else "", "    ")


def hint(what: str, lane: Lane | None) -> str:
    """The first hint for an exception, whose type and text are given; "" if there is none.

    ``lane``: the lane of the rank that raised it, if it is known.
    """
    sentences = [sentence for pattern, sentence in HINTS if re.search(pattern, what)]
    if lane is not None and lane.device_type == "cpu" and re.search(NO_CUDA, what):
        sentences.append(_without_gpus(lane))
    if lane is not None and lane.device_type == "cuda" and re.search(NO_SUCH_DEVICE, what):
        sentences.append(SHARED_GPU if lane.ranks_share_gpus else GPUS_OF_NODE)
    return next(iter(sentences), "")


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
