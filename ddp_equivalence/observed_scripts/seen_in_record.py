"""Causes that a record shows by itself: what ranks do that no rank may do, or do differently.

One process would make the same mistake, or would not show it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes import CAUSE_OF
from ddp_equivalence.diagnosis.causes.clipping import BEFORE_REDUCE, WHILE_SCALED
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, ranks_by_number
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss
from ddp_equivalence.diagnosis.lines.source import classes_in, last_name, nodes_in
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.observed_scripts.oracle import ONE_AFTER_THE_OTHER, CannotReplay
from ddp_equivalence.observed_scripts.record import BEFORE_CLIP, HELD, OWN, STALE, LastLine, Step
from ddp_equivalence.observed_scripts.script_step import (
    Gradients,
    ScriptStep,
    distance,
    left_over,
    nearly_equal,
    rounding_of,
)
from ddp_equivalence.report.verdict import Verdict

SAME_DATA = "every_rank_same_data"
OTHER_UPDATES = "optimizers_differ_between_ranks"
NOT_ADDITIVE = "statistic_not_additive"
FROZEN = "parameter_frozen_on_one_rank"

OF_SCRIPTS = (
    Hypothesis(
        OTHER_UPDATES,
        "ranks with the same weights and gradients make different updates",
        "learning rates, options and state of the optimizer, and what decides whether it steps: "
        "none may depend on the rank",
    ),
    Hypothesis(
        "clipped_otherwise",
        "the gradients are right before they are clipped, and not afterwards",
        "the norm and the limit with which each rank clips",
    ),
    Hypothesis(
        "ranks_wait_for_each_other",
        "ranks wait for each other in different collectives, or for one that has left",
        "what decides how many steps a rank makes: it must be the same on all ranks",
    ),
)
"""The causes that only scripts can have."""

OF_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers in which the ranks differ by design: training does not read them."""


def seen(
    cause: str, headline: str, fix: str, lines: Sequence[PointedLine], because: str = ""
) -> Finding:
    """A finding that a cause was seen happening."""
    row = CAUSE_OF.get(cause) or next(one for one in OF_SCRIPTS if one.name == cause)
    return Finding(
        cause=cause,
        sentence=row.sentence,
        look_at=row.look_at,
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
    read = [step.digests_of_rows(rank) for rank in step.ranks]
    are_known = read[0] and not any(row.row is None for row in step.rows)
    if not are_known or any(one != read[0] for one in read):
        return
    first = step.recorded[0]
    made = first.last_line(LastLine.MADE, "loader")
    lines = lines_at(made, "its rows are the same on every rank")
    if not lines and first.calls:
        lines = lines_at(first.calls[0].place, "is called with the same rows on every rank")
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
    held, own = step.gradients_of_ranks(BEFORE_CLIP), step.gradients_of_ranks(OWN)
    names = [name for name, one in held[0].items() if one is not None]
    pairs = zip(own, held, strict=True)
    is_own = all(is_equal(mine.get(x), one.get(x)) for mine, one in pairs for x in names)
    if not names or not is_own:
        return
    if all(is_equal(one[name], held[0][name]) for one in held for name in names):
        return
    if reduces_after_clipping(step):
        return
    weights, first = [one.weights for one in step.recorded], step.recorded[0]
    apart = any(one.get(name) != weights[0].get(name) for one in weights for name in first.stepped)
    yield seen(
        "no_all_reduce",
        "every rank trains alone"
        + (", and the ranks begin with different weights" if apart else ""),
        "wrap the model in DistributedDataParallel before it trains.",
        lines_at(
            first.last_backward,
            "the optimizer gets this rank's own gradients",
            missing="an average over all ranks, as DistributedDataParallel makes it",
        ),
        "the optimizer of each rank gets the rank's own gradients, bit for bit",
    )


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """True for two tensors that are equal, bit for bit."""
    return one is not None and other is not None and torch.equal(one, other)


def reduces_after_clipping(step: ScriptStep) -> bool:
    """True if every rank clips what it alone has computed, and all step with the same gradient.

    Before the clip nothing is reduced yet: what counts is the gradient that the optimizer gets.
    """
    if not all(one.clips for one in step.recorded):
        return False
    own, held = step.gradients_of_ranks(OWN), step.gradients_of_ranks(HELD)
    is_own = all(map(nearly_equal, step.gradients_of_ranks(BEFORE_CLIP), own))
    # If all ranks have computed the same, it cannot be told whether they are reduced.
    return is_own and not _all_alike(own) and _all_alike(held)


def _all_alike(by_rank: Sequence[Gradients]) -> bool:
    return all(nearly_equal(by_rank[0], one) for one in by_rank)


def _clipped_while_scaled(step: ScriptStep) -> Iterator[Finding]:
    clips = [clip for one in step.recorded for clip in one.clips]
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
    clips = [(rank, clip) for rank, one in enumerate(step.recorded) for clip in one.clips]
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
    recorded = step.recorded
    trained = set[str]().union(*(one.stepped for one in recorded))
    late, named = _on_some_ranks(step, [trained & one.frozen for one in recorded])
    where = ranks_by_number(late)
    if late:
        yield seen(
            FROZEN,
            f"{named} is frozen on {where} only",
            "set requires_grad alike on all ranks, before the model is wrapped.",
            (),
            f"requires_grad of {named} is False on {where} when the optimizer steps",
        )
    stepped = [set(one.held) for one in recorded]
    names = set[str]().union(*stepped)
    late, named = _on_some_ranks(step, [names - one for one in stepped])
    where = ranks_by_number(late)
    if any(recorded[rank].unnamed for rank in late):
        return  # they may be there, in modules that these ranks have not called yet
    if late and set[str].intersection(*stepped):
        yield seen(
            FROZEN,
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
    return ranks, _and_more(list(map(step.short, names)))


def _and_more(names: Collection[str]) -> str:
    return min(names, default="") + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def other_optimizers_step(step: ScriptStep) -> Iterator[Finding]:
    """No parameter is stepped with on all ranks, which in the first step had the same ones."""
    begin = step.record.steps[0]
    first = [set(step.record.step(rank, begin).held) for rank in step.ranks]
    now = [set(one.held) for one in step.recorded]
    if any(names != first[0] for names in first) or now[0].intersection(*now):
        return
    notes = [
        f"rank {rank} steps with {_and_more([name.replace(':', '.') for name in names])}"
        for rank, names in enumerate(now)
    ]
    places = [
        lines_at(one.stepped_at, note) for one, note in zip(step.recorded, notes, strict=True)
    ]
    yield seen(
        OTHER_UPDATES,
        "ranks step with different optimizers: " + "; ".join(notes),
        "decide alike on all ranks, from values that are reduced over the ranks.",
        [line for lines in places for line in lines],
    )


# Weights and buffers that are not trained, such as those of a teacher.


def tensors_differ_between_ranks(step: ScriptStep) -> Iterator[Finding]:
    """Ranks have other values in tensors that are not trained, and a rank that has others than
    rank 0 computes what one process, which has those of rank 0, does not compute from its rows.
    """
    weights, recorded = [one.weights for one in step.recorded], step.recorded[0]
    names = [
        name
        for name, value in weights[0].items()
        if name not in recorded.held and not name.endswith(OF_BATCH_NORM)
        if len({one.get(name, value) for one in weights}) > 1
    ]
    apart = [r for r in step.ranks if any(weights[r].get(n) != weights[0][n] for n in names)]
    if not names or _computes_what_its_rows_give(step, 0) is not True:
        return
    if not any(_computes_what_its_rows_give(step, rank) is False for rank in apart):
        return
    module, _, named = names[0].partition(":")
    of_module = [name for name in names if name.startswith(f"{module}:")]
    are_buffers = all(name in recorded.buffers_kept for name in of_module)
    kind, what = ("buffers", "tensors") if are_buffers else ("weights", "weights")
    headline = f"{named} of {module} differs between ranks"
    if len(of_module) > 1:
        headline = f"{len(of_module)} {what} of {module} differ between ranks, such as {named}"
    yield seen(
        f"{kind}_differ_between_ranks",
        headline,
        f"give {module} the same {what} on all ranks; broadcast or reduce what changes them.",
        lines_at(line_of_buffer(step, names[0]), f"gives {named} another value on each rank")
        if are_buffers
        else _done_on_some_ranks(step, LastLine.LOADED, module),
        f"{ranks_by_number(apart)} computed what one process, which has the {what} of rank 0, "
        "does not compute from the same rows",
    )


def _computes_what_its_rows_give(step: ScriptStep, rank: int) -> bool | None:
    """None if one process cannot compute it."""
    try:
        return nearly_equal(step.gradients(rank, OWN), step.computed(step.alone(rank)))
    except CannotReplay:
        return None


def _done_on_some_ranks(step: ScriptStep, change: LastLine, *of: str) -> tuple[PointedLine, ...]:
    """The line that makes this change, if only some ranks run it."""
    by_rank = [one.last_line(change, *of) for one in step.recorded]
    ranks = [rank for rank, line in enumerate(by_rank) if line is not None]
    if not ranks or len(ranks) == len(by_rank):
        return ()
    return lines_at(by_rank[ranks[0]], f"{change.value} on {ranks_by_number(ranks)} only")


# The only line that gives something a value, read in the source of the script.


def line_of_buffer(step: ScriptStep, buffer: str) -> CodeLine | None:
    """The line in the class of its module that gives a buffer its value; None if none is known."""
    kept_by = step.recorded[0].buffers_kept.get(buffer)
    name = re.split("[.:]", buffer)[-1]
    return kept_by and line_that_assigns(kept_by.file, name, kept_by.function)


def line_that_assigns(file: str, name: str, kind: str = "") -> CodeLine | None:
    """The only line that assigns the value under this key, such as ``group["lr"]``, or writes into
    it; None if there are several. ``kind``: the name of a class, of which it is an attribute of
    self, that a line outside of ``__init__`` assigns.
    """
    classes = [owner for owner in classes_in(file) if owner.name == kind]
    functions = [one for owner in classes for one in owner.body] if kind else nodes_in(file)

    def is_meant(node: ast.AST) -> bool:
        if kind and isinstance(node, ast.Attribute):
            return node.attr == name and last_name(node.value) == "self"
        key = node.slice if isinstance(node, ast.Subscript) and not kind else None
        return isinstance(key, ast.Constant) and key.value == name

    found = {
        CodeLine(file, node.lineno, function.name)
        for function in functions
        if isinstance(function, ast.FunctionDef) and (not kind or function.name != "__init__")
        for node in ast.walk(function)
        if isinstance(node, ast.stmt | ast.expr)
        if any(is_meant(one) for target in _written_to(node) for one in ast.walk(target))
    }
    return found.pop() if len(found) == 1 else None


def _written_to(node: ast.AST) -> list[ast.AST]:
    """The targets that a statement assigns, or that a method such as copy_ changes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        return [node.func.value] if method.endswith("_") and not method.endswith("__") else []
    if isinstance(node, ast.Assign):
        return [*node.targets]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


# What is added to the gradients of a step, or not divided.

SAME_FACTOR = 1e-6
"""Gradients are multiples of others if they are off by less than this."""


def holds_the_mean_of_own(step: ScriptStep, *more: Sequence[Gradients]) -> bool:
    """True if every rank holds the mean of what the ranks computed. ``more``: gradients of each
    rank that are added to its own.
    """
    computed = [one for by_rank in (step.gradients_of_ranks(OWN), *more) for one in by_rank]
    terms = [(-1.0 / len(step.ranks), one) for one in computed]
    held = step.gradients_of_ranks(BEFORE_CLIP)
    return all(distance([(1.0, one), *terms]) <= rounding_of(one) for one in held)


def micro_batches_added_up(step: ScriptStep, verdict: Verdict) -> Iterator[Finding]:
    """The script divides its micro-batches among the ranks, and adds their gradients up: what each
    rank holds is then a part of the sum that one process makes.
    """
    comparison, oracle, ranks = verdict.comparison, step.oracle, len(step.ranks)
    if comparison is None or oracle is None or oracle.arrangement != ONE_AFTER_THE_OTHER:
        return
    errors = [error for one in comparison.parameters for error in one.by_rank if error.ratio > 0]
    if any(
        abs(error.factor * ranks - 1) > SAME_FACTOR or error.unexplained > SAME_FACTOR
        for error in errors
    ):
        return
    # Own gradients of sharded parameters are not seen.
    known = all(None not in one.values() for one in step.gradients_of_ranks(OWN))
    if known and not holds_the_mean_of_own(step):
        return  # the reduction is wrong, too
    recorded = step.recorded[0]
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
    stale = step.gradients_of_ranks(STALE)
    late = [r for r, of_rank in enumerate(stale) if any(g is not None for g in of_rank.values())]
    if not late or not holds_the_mean_of_own(step, stale):
        return
    where = "on every rank" if len(late) == len(stale) else f"on {ranks_by_number(late)}"
    recorded = step.recorded[late[0]]
    yield seen(
        "stale_gradient_added",
        "gradients of a step before are added",
        "call optimizer.zero_grad() in every step, on every rank.",
        _done_on_some_ranks(step, LastLine.CLEARED, "optimizer", *sorted(recorded.entered))
        or lines_at(recorded.backward_at[0], f"adds to gradients that are there already {where}"),
        f"{where}, .grad is not zero when the step first goes backward",
    )


# Ranks that average rightly what is no part of the big batch's gradient: where the loss depends on
# rows together, as with negatives or a ratio of norms, or hooks limit each rank's own gradient.

CERTAIN = 5
"""So many times the rounding must the big batch's gradient leave unexplained."""


def wrong_though_averaged(step: ScriptStep, view: View | None) -> Iterator[Finding]:
    """The finding, if the ranks hold the mean of their own gradients, and the gradient of all rows
    is no weighted sum of these. ``view``: of the step.
    """
    own = step.gradients_of_ranks(OWN)
    try:
        answers, of_all = [step.alone(rank) for rank in step.ranks], step.answer(step.everything)
    except CannotReplay:
        return
    together = step.computed(of_all)
    left = left_over(together, own)
    if left <= CERTAIN * rounding_of(together) or not holds_the_mean_of_own(step):
        return
    amount = f"{text_of(left, '.2g')} of the big batch's gradient is no weighted sum of"
    counted = zip(answers, step.rows_by_rank, strict=True)
    mean = sum(sum(one.losses) * len(rows) for one, rows in counted) / len(step.rows)
    if abs(sum(of_all.losses) - mean) <= NEGLIGIBLE * abs(mean):  # the loss itself is a mean
        hooks = [] if view is None else view.observed.calls.places(Kind.TENSOR_HOOK)
        hooks = [place for place in hooks if any(call.names for call in place.calls)]
        if hooks and all(map(_is_limited, own)):
            note = "the hook changes this rank's own gradient"
            yield seen(
                BEFORE_REDUCE.name,
                "hooks clip each rank's gradient before the reduction",
                "clip after the gradients of all ranks are reduced, before the optimizer steps.",
                [place.pointed(note, is_fault=len(hooks) == 1) for place in hooks],
                "many elements of a rank's own gradient have the same, largest size; "
                f"{amount} the ranks' own",
            )
        return
    repeats = all(map(nearly_equal, own, map(step.computed, answers)))
    if repeats and not any(one.batch_norm for one in step.recorded):
        note = "the loss of this rank's rows alone"
        made = line_of_loss(view, note, is_fault=True) if view is not None else None
        at_backward = lines_at(step.recorded[0].last_backward, f"begins at {note}")
        yield seen(
            NOT_ADDITIVE,
            "the loss depends on rows together, and a rank has only its own",
            "none, if that is meant; else gather from all ranks what the loss compares.",
            at_backward if made is None else (made,),
            "each rank computes what its rows give alone, and their average is right, but "
            f"{amount} these",
        )


def _is_limited(gradients: Gradients) -> bool:
    """True if more elements of a parameter's gradient have its largest size than by chance."""
    sizes = [one.abs() for one in gradients.values() if one is not None and one.any()]
    return any(int((one == one.max()).sum()) > 1 + one.numel() // 1000 for one in sizes)


# The step in which optimizers that have the same gradients make different updates.

LENGTH_OF_DIGEST = 64


def _weights_part(step: ScriptStep) -> Iterator[Finding]:
    """The finding, if trained weights differ between ranks that were equal before an earlier step,
    and so were their gradients. It names the option or the state of the optimizers that differed.
    """
    now = [one.weights for one in step.recorded]
    apart = [name for name in now[0] if len({one.get(name) for one in now}) > 1]
    for number in reversed(range(step.number)) if apart else ():
        before = [step.record.step(rank, number) for rank in step.ranks]
        if stepped := set(apart).intersection(before[0].stepped):
            break
    else:
        return
    for name in stepped:
        first, *others = (one.held.get(name) for one in before)
        were_apart = len({one.weights.get(name) for one in before}) > 1
        if were_apart or not all(is_equal(first, other) for other in others):
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
    by_rank, first = [one.steps_with for one in before], before[0]
    keys = [
        key
        for key in {**by_rank[0], **by_rank[-1]}
        if len({one.get(key) for one in by_rank}) > 1
        and (" of group " in key or key.partition(" of ")[2] in stepped)
    ]
    if not keys:
        return "", first.stepped_at
    option, _, of = keys[0].partition(" of ")
    values = [one.get(keys[0], "none") for one in by_rank]
    each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    is_tensor = LENGTH_OF_DIGEST in map(len, values)
    text = f"differs ({len(keys)} such differences)" if is_tensor else f"is {each}"
    if not of.startswith("group "):
        loaded = (one.last_line(LastLine.LOADED, "optimizer") for one in before)
        return f"{option} of {step.short(of)} {text}", next(filter(None, loaded), first.stepped_at)
    set_by = first.last_line(LastLine.SCHEDULED, "optimizer") if option == "lr" else None
    set_by = set_by or (first.stepped_at and line_that_assigns(first.stepped_at.file, option))
    as_given = first.stepped_at if first.number else first.last_line(LastLine.MADE, "optimizer")
    return f"{option} of {of} {text}", set_by or as_given
