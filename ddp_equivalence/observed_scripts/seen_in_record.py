"""Causes that a record shows by itself: what ranks do that no rank may do, or do differently.

One process would make the same mistake, or would not show it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes import CAUSE_OF
from ddp_equivalence.diagnosis.causes.clipping import WHILE_SCALED
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.source import classes_in, last_name, nodes_in
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.as_case import (
    ScriptStep,
    holds_the_mean_of_own,
    nearly_equal,
)
from ddp_equivalence.observed_scripts.oracle import ONE_AFTER_THE_OTHER, CannotReplay
from ddp_equivalence.observed_scripts.record import (
    BEFORE_CLIP,
    HELD,
    OWN,
    STALE,
    GradientKind,
    LastLine,
    Step,
)
from ddp_equivalence.report.verdict import Verdict

SAME_FACTOR = 1e-6
"""Gradients are multiples of others if they are off by less than this."""

SAME_DATA = "every_rank_same_data"
OTHER_UPDATES = "optimizers_differ_between_ranks"

OF_SCRIPTS = {
    OTHER_UPDATES: (
        "ranks with the same weights and gradients make different updates",
        "learning rates, options and state of the optimizer, and what decides whether it steps: "
        "none may depend on the rank",
    ),
    "clipped_otherwise": (
        "the gradients are right before they are clipped, and not afterwards",
        "the norm and the limit with which each rank clips",
    ),
    "ranks_wait_for_each_other": (
        "ranks wait for each other in different collectives, or for one that has left",
        "what decides how many steps a rank makes: it must be the same on all ranks",
    ),
}
"""The causes that only scripts can have -> what happened, and where to look."""

OF_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers in which the ranks differ by design: training does not read them."""


def seen(
    cause: str, headline: str, fix: str, lines: Sequence[PointedLine], because: str = ""
) -> Finding:
    """A finding that a cause was seen happening."""
    if cause in OF_SCRIPTS:
        sentence, look_at = OF_SCRIPTS[cause]
    else:
        sentence, look_at = CAUSE_OF[cause].sentence, CAUSE_OF[cause].look_at
    return Finding(
        cause=cause,
        sentence=sentence,
        look_at=look_at,
        accepted=True,
        headline=headline,
        because=because,
        fix=fix,
        lines=tuple(lines),
    )


def lines_at(at: CodeLine | None, note: str, missing: str = "") -> tuple[PointedLine, ...]:
    """The line to mark; () if none is known. ``missing``: what should follow it."""
    return () if at is None else (PointedLine(at, note, is_fault=True, missing=missing),)


def faults_seen(step: ScriptStep) -> Iterator[Finding]:
    """The causes that were seen happening in this step, whatever is compared."""
    yield from _same_rows(step)
    yield from _nothing_reduced(step)
    yield from _clipped_while_scaled(step)
    yield from _not_trained_on_some_ranks(step)
    yield from _weights_part(step)


def _same_rows(step: ScriptStep) -> Iterator[Finding]:
    if any(row.row is None for row in step.rows):
        return
    read = [step.digests_of_rows(rank) for rank in step.ranks]
    if any(one != read[0] for one in read) or not read[0]:
        return
    recorded = step.of_rank(0)
    lines = lines_at(
        recorded.last_line(LastLine.MADE, "loader"), "its rows are the same on every rank"
    )
    for call in recorded.calls[:1]:
        lines = lines or lines_at(call.place, "is called with the same rows on every rank")
    yield seen(
        SAME_DATA,
        "every rank reads the same rows",
        "give the loader a DistributedSampler, or seed the data by rank.",
        lines,
        f"the batches of {len(read)} ranks are equal, element for element",
    )


def _nothing_reduced(step: ScriptStep) -> Iterator[Finding]:
    """Every rank steps with its own gradients, bit for bit, and they are not those of the others.

    This is also seen where ranks begin with different weights, so that nothing can be predicted.
    """
    held = [step.gradients(rank, BEFORE_CLIP) for rank in step.ranks]
    names = [name for name, one in held[0].items() if one is not None]
    own = [step.gradients(rank, OWN) for rank in step.ranks]
    pairs = ((mine[name], one[name]) for mine, one in zip(own, held, strict=True) for name in names)
    if not names or not all(is_equal(*pair) for pair in pairs):
        return
    if all(is_equal(one[name], held[0][name]) for one in held for name in names):
        return
    if reduces_after_clipping(step):
        return
    weights = [step.of_rank(rank).weights for rank in step.ranks]
    trained = step.of_rank(0).stepped
    apart = any(one.get(name) != weights[0].get(name) for one in weights for name in trained)
    yield seen(
        "no_all_reduce",
        "every rank trains alone"
        + (", and the ranks begin with different weights" if apart else ""),
        "wrap the model in DistributedDataParallel before it trains.",
        lines_at(
            step.of_rank(0).last_backward,
            "the optimizer gets this rank's own gradients",
            missing="an average over all ranks, as DistributedDataParallel makes it",
        ),
        "the optimizer of each rank gets the rank's own gradients, bit for bit",
    )


def is_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """True for two tensors that are equal, bit for bit."""
    return one is not None and other is not None and torch.equal(one, other)


def reduces_after_clipping(step: ScriptStep) -> bool:
    """True if every rank clips what it alone has computed, and all step with the same gradient.

    Before the clip nothing is reduced yet: what counts is the gradient that the optimizer gets.
    """
    if not all(step.of_rank(rank).clips for rank in step.ranks):
        return False
    if not all(_agree(step, (rank, BEFORE_CLIP), (rank, OWN)) for rank in step.ranks):
        return False
    if all(_agree(step, (0, OWN), (rank, OWN)) for rank in step.ranks):
        return False  # then it cannot be told whether they are reduced
    return all(_agree(step, (0, HELD), (rank, HELD)) for rank in step.ranks)


def _agree(
    step: ScriptStep, one: tuple[int, GradientKind], other: tuple[int, GradientKind]
) -> bool:
    return nearly_equal(step.gradients(*one), step.gradients(*other))


def _clipped_while_scaled(step: ScriptStep) -> Iterator[Finding]:
    clips = [clip for rank in step.ranks for clip in step.of_rank(rank).clips]
    for clip in [one for one in clips if one.scale != 1.0 and one.changed][:1]:
        scale, limit = text_of(clip.scale, ".6g"), text_of(clip.limit, ".3g")
        really = text_of(clip.limit / clip.scale, ".2g")
        yield seen(
            WHILE_SCALED.name,
            f"gradients are clipped while they are scaled by {scale}",
            "call scaler.unscale_(optimizer) before the gradients are clipped.",
            lines_at(
                clip.place,
                f"clips to {limit} what is scaled by {scale}: the norm is {really} afterwards",
            ),
            f"clipping to {limit} limits the real norm to {really}",
        )


def clipped_otherwise(step: ScriptStep) -> Finding:
    """The gradients are right before they are clipped, and not afterwards."""
    clips = [(rank, clip) for rank in step.ranks for clip in step.of_rank(rank).clips]
    texts = {
        f"rank {rank}: to {text_of(clip.limit, '.3g')}, norm {text_of(clip.norm, '.3g')}"
        for rank, clip in clips
    }
    each = "; ".join(sorted(texts))
    return seen(
        "clipped_otherwise",
        "the gradients are right before they are clipped, and not afterwards",
        "clip on every rank to the same limit, by the norm of the reduced gradients.",
        lines_at(clips[0][1].place, each) if clips else (),
        each,
    )


# Parameters that some ranks train and others do not.


def _not_trained_on_some_ranks(step: ScriptStep) -> Iterator[Finding]:
    """Some ranks freeze what others train, or their optimizers do not have it."""
    recorded = [step.of_rank(rank) for rank in step.ranks]
    trained = set[str]().union(*(one.stepped for one in recorded))
    late, named = _on_some_ranks(step, [trained & one.frozen for one in recorded])
    where = ranks_by_number(late)
    if late:
        yield seen(
            "parameter_frozen_on_one_rank",
            f"{named} is frozen on {where} only",
            "set requires_grad alike on all ranks, before the model is wrapped.",
            (),
            f"requires_grad of {named} is False on {where} when the optimizer steps",
        )
    stepped = _stepped_with(step, step.number)
    names = set[str]().union(*stepped)
    late, named = _on_some_ranks(step, [names - one for one in stepped])
    where = ranks_by_number(late)
    if any(recorded[rank].unnamed for rank in late):
        return  # they may be there, in modules that these ranks have not called yet
    if late and set[str].intersection(*stepped):
        yield seen(
            "parameter_frozen_on_one_rank",
            f"the optimizer of {where} does not have {named}",
            "give the optimizer the same parameters on all ranks.",
            lines_at(
                recorded[late[0]].last_line(LastLine.MADE, "optimizer"),
                f"makes the optimizer, on {where} without {named}",
            ),
            f"{named} is in the optimizer of other ranks",
        )


def _on_some_ranks(step: ScriptStep, by_rank: Sequence[set[str]]) -> tuple[list[int], str]:
    """The ranks that have a name which not all ranks have, and these names in words."""
    names = set[str]().union(*by_rank) - set[str].intersection(*by_rank)
    ranks = [rank for rank, own in enumerate(by_rank) if names & own]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ranks, min(map(step.short, names), default="") + more


def _stepped_with(step: ScriptStep, number: int) -> list[set[str]]:
    """For each rank, the parameters with which its optimizers stepped in a step."""
    return [set(step.record.step(rank, number).held) for rank in step.ranks]


def other_optimizers_step(step: ScriptStep) -> Iterator[Finding]:
    """No parameter is stepped with on all ranks, which in the first step had the same ones."""
    first, now = _stepped_with(step, step.record.steps[0]), _stepped_with(step, step.number)
    if any(names != first[0] for names in first) or now[0].intersection(*now):
        return
    notes = [
        f"rank {rank} steps with {min(names).replace(':', '.')}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for rank, names in enumerate(now)
    ]
    yield seen(
        OTHER_UPDATES,
        "ranks step with different optimizers: " + "; ".join(notes),
        "decide alike on all ranks, from values that are reduced over the ranks.",
        [
            line
            for rank, note in enumerate(notes)
            for line in lines_at(step.of_rank(rank).stepped_at, note)
        ],
    )


# Weights and buffers that are not trained, such as those of a teacher.


def tensors_differ_between_ranks(step: ScriptStep) -> Iterator[Finding]:
    """Ranks have other values in tensors that are not trained, and a rank that has others than
    rank 0 computes what one process, which has those of rank 0, does not compute from its rows.
    """
    weights = [step.of_rank(rank).weights for rank in step.ranks]
    first, buffers = weights[0], step.of_rank(0).buffers_kept
    trained = step.of_rank(0).held
    names = [
        name
        for name, value in first.items()
        if name not in trained and not name.endswith(OF_BATCH_NORM)
        if len({one.get(name, value) for one in weights}) > 1
    ]
    apart = [r for r in step.ranks if any(weights[r].get(name) != first[name] for name in names)]
    if not names or _computes_what_its_rows_give(step, 0) is not True:
        return
    if not any(_computes_what_its_rows_give(step, rank) is False for rank in apart):
        return
    module = names[0].partition(":")[0]
    of_module = [name for name in names if name.startswith(f"{module}:")]
    are_buffers = all(name in buffers for name in of_module)
    kind, what = ("buffers", "tensors") if are_buffers else ("weights", "weights")
    named = of_module[0].partition(":")[2]
    headline = f"{named} of {module} differs between ranks"
    if len(of_module) > 1:
        headline = f"{len(of_module)} {what} of {module} differ between ranks, such as {named}"
    yield seen(
        f"{kind}_differ_between_ranks",
        headline,
        f"give {module} the same {what} on all ranks; broadcast or reduce what changes them.",
        lines_at(line_of_buffer(step, of_module[0]), f"gives {named} another value on each rank")
        if are_buffers
        else _done_on_some_ranks(step, LastLine.LOADED, module),
        f"{ranks_by_number(apart)} computed what one process, which has the {what} of rank 0, "
        "does not compute from the same rows",
    )


def _done_on_some_ranks(step: ScriptStep, change: LastLine, *of: str) -> tuple[PointedLine, ...]:
    """The line that makes this change, if only some ranks run it."""
    by_rank = [step.of_rank(rank).last_line(change, *of) for rank in step.ranks]
    ranks = [rank for rank, line in enumerate(by_rank) if line is not None]
    if not ranks or len(ranks) == len(by_rank):
        return ()
    return lines_at(by_rank[ranks[0]], f"{change.value} on {ranks_by_number(ranks)} only")


def line_of_buffer(step: ScriptStep, buffer: str) -> CodeLine | None:
    """The line in the class of its module that gives a buffer its value; None if none is known."""
    kept_by = step.of_rank(0).buffers_kept.get(buffer)
    name = re.split("[.:]", buffer)[-1]
    return kept_by and line_that_assigns(kept_by.file, name, kept_by.function)


def line_that_assigns(file: str, name: str, kind: str = "") -> CodeLine | None:
    """The only line that assigns the value under this key, such as ``group["lr"]``, or writes into
    it; None if there are several. ``kind``: the name of a class, of which it is an attribute of
    self, that a line outside of ``__init__`` assigns.
    """
    classes = [owner for owner in classes_in(file) if owner.name == kind]
    functions = [one for owner in classes for one in owner.body] if kind else nodes_in(file)
    found = {
        CodeLine(file, node.lineno, function.name)
        for function in functions
        if isinstance(function, ast.FunctionDef) and (not kind or function.name != "__init__")
        for node in ast.walk(function)
        if isinstance(node, ast.stmt | ast.expr)
        for target in _written_to(node)
        for one in ast.walk(target)
        if (_is_own(one, name) if kind else _has_key(one, name))
    }
    return found.pop() if len(found) == 1 else None


def _is_own(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and last_name(node.value) == "self"


def _has_key(node: ast.AST, name: str) -> bool:
    key = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(key, ast.Constant) and key.value == name


def _written_to(node: ast.AST) -> list[ast.AST]:
    """The targets that a statement assigns, or that a method such as copy_ changes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        return [node.func.value] if method.endswith("_") and not method.endswith("__") else []
    if isinstance(node, ast.Assign):
        return [*node.targets]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _computes_what_its_rows_give(step: ScriptStep, rank: int) -> bool | None:
    """None if one process cannot compute it."""
    try:
        return nearly_equal(step.gradients(rank, OWN), step.computed(step.alone(rank)))
    except CannotReplay:
        return None


# What is added to the gradients of a step, or not divided.


def micro_batches_added_up(step: ScriptStep, verdict: Verdict) -> Iterator[Finding]:
    """The script divides its micro-batches among the ranks, and adds their gradients up: what each
    rank holds is then a part of the sum that one process makes.
    """
    comparison, oracle, ranks = verdict.comparison, step.oracle, len(step.ranks)
    if comparison is None or oracle is None or oracle.arrangement != ONE_AFTER_THE_OTHER:
        return
    errors = [error for parameter in comparison.parameters for error in parameter.by_rank]
    if any(
        abs(error.factor * ranks - 1) > SAME_FACTOR or error.unexplained > SAME_FACTOR
        for error in errors
        if error.ratio > 0
    ):
        return
    # Own gradients of sharded parameters are not seen.
    known = all(None not in step.gradients(rank, OWN).values() for rank in step.ranks)
    if known and not holds_the_mean_of_own(step):
        return  # the reduction is wrong, too
    recorded = step.of_rank(0)
    passes = len(recorded.losses)
    yield seen(
        "accumulation_not_divided",
        "micro-batches are added up, so their number scales the gradient",
        "divide each loss by the number of micro-batches that this process has.",
        lines_at(
            recorded.backward_at[0],
            f"runs {passes} times in a step here, and {passes * ranks} times in one process",
        ),
        f"a rank goes backward {passes} times in a step, one process {passes * ranks} times",
    )


def stale_gradients(step: ScriptStep) -> Iterator[Finding]:
    """Ranks went backward without having cleared the gradients of a step before, and the ranks
    hold the mean of these and of their own gradients.
    """
    late = [
        rank
        for rank in step.ranks
        if any(one is not None for one in step.gradients(rank, STALE).values())
    ]
    if not late or not holds_the_mean_of_own(step, STALE):
        return
    where = "on every rank" if len(late) == len(step.ranks) else f"on {ranks_by_number(late)}"
    recorded = step.of_rank(late[0])
    yield seen(
        "stale_gradient_added",
        "gradients of a step before are added",
        "call optimizer.zero_grad() in every step, on every rank.",
        _done_on_some_ranks(step, LastLine.CLEARED, "optimizer", *sorted(recorded.entered))
        or lines_at(recorded.backward_at[0], f"adds to gradients that are there already {where}"),
        f"{where}, .grad is not zero when the step first goes backward",
    )


# The step in which optimizers that have the same gradients make different updates.

LENGTH_OF_DIGEST = 64


def _weights_part(step: ScriptStep) -> Iterator[Finding]:
    """The finding, if trained weights differ between ranks that were equal before an earlier step,
    and so were their gradients. It names the option or the state of the optimizers that differed.
    """
    now = [step.of_rank(rank).weights for rank in step.ranks]
    apart = [name for name in now[0] if len({one.get(name) for one in now}) > 1]
    for number in reversed(range(step.number)) if apart else ():
        before = [step.record.step(rank, number) for rank in step.ranks]
        if stepped := set(apart).intersection(before[0].stepped):
            break
    else:
        return
    for name in stepped:
        first, *others = (one.held.get(name) for one in before)
        if not all(is_equal(first, other) for other in others):
            return
        if len({one.weights.get(name) for one in before}) > 1:
            return
    found, place = _what_differs(step, before, stepped)
    yield seen(
        OTHER_UPDATES,
        f"weights are equal until step {number + 1}, in which the optimizers of the ranks "
        f"make different updates{found and f': {found}'}",
        "let all ranks make the same update: with the same options and state, decided from "
        "values that are reduced over the ranks, and loaded on every rank.",
        lines_at(place, found or "weights differ after this step, and not before it"),
    )


def _what_differs(
    step: ScriptStep, before: Sequence[Step], stepped: Collection[str]
) -> tuple[str, CodeLine | None]:
    """The first option or state of the optimizers that differs, in words, and the line of it."""
    by_rank = [one.steps_with for one in before]
    keys = [
        key
        for key in {**by_rank[0], **by_rank[-1]}
        if len({one.get(key) for one in by_rank}) > 1
        and (" of group " in key or key.partition(" of ")[2] in stepped)
    ]
    if not keys:
        return "", before[0].stepped_at
    option, _, of = keys[0].partition(" of ")
    values = [one.get(keys[0], "none") for one in by_rank]
    each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    is_tensor = LENGTH_OF_DIGEST in map(len, values)
    text = f"differs ({len(keys)} such differences)" if is_tensor else f"is {each}"
    stepped_at = before[0].stepped_at
    if not of.startswith("group "):
        loaded = (one.last_line(LastLine.LOADED, "optimizer") for one in before)
        return f"{option} of {step.short(of)} {text}", next(filter(None, loaded), stepped_at)
    set_by = before[0].last_line(LastLine.SCHEDULED, "optimizer") if option == "lr" else None
    set_by = set_by or (stepped_at and line_that_assigns(stepped_at.file, option))
    as_given = before[0].last_line(LastLine.MADE, "optimizer")
    return f"{option} of {of} {text}", set_by or (stepped_at if before[0].number else as_given)
