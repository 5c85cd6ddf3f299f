"""What a record shows to be wrong without any comparison with one process."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes.clipping import WHILE_SCALED
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.observed_scripts.as_case import OWN, STALE, ObservedStep, holds_the_mean_of_own
from ddp_equivalence.observed_scripts.differences_between_ranks import (
    differences_between_ranks,
    lines_at,
    ranks_text,
)
from ddp_equivalence.observed_scripts.not_comparable import reduces_after_clipping
from ddp_equivalence.observed_scripts.oracle import ONE_AFTER_THE_OTHER
from ddp_equivalence.observed_scripts.recorded_step import Place, RecordedStep
from ddp_equivalence.report.verdict import Verdict

# What a record shows to be wrong without any comparison with one process.
#
# One process would make the same mistake, or would not show it: clipping of gradients that are
# still multiplied by a loss scale, and ranks that read the same rows.

SAME_FACTOR = 1e-6
"""Gradients are multiples of others if they are off by less than this."""

CLIPPED_OTHERWISE = "clipped_otherwise"
SAME_DATA = "every_rank_same_data"
ADDED_UP = "accumulation_not_divided"


def faults_seen(step: ObservedStep) -> Iterator[Finding]:
    """The causes that were seen happening in this step."""
    yield from _same_rows(step)
    yield from _nothing_reduced(step)
    yield from _clipped_while_scaled(step)
    yield from differences_between_ranks(step)
    yield from weights_part(step)


def _nothing_reduced(step: ObservedStep) -> Iterator[Finding]:
    """Every rank steps with its own gradients, bit for bit, and they are not those of the others.

    This is also seen where ranks begin with different weights, so that nothing can be predicted.
    """
    by_rank = []
    for rank in range(step.record.world_size):
        reader = step.record.reader(rank, step.number)
        own = reader.below("own/")
        before = reader.below("before_clip/") or reader.below("held/")
        names = [name for name in reader.gradient_names("held/") if name in before]
        if not names or any(name not in own for name in names):
            return
        if not all(torch.equal(own[name], before[name]) for name in names):
            return
        by_rank.append([before[name] for name in names])
    first, *others = by_rank
    if not others or all(
        one.shape == other.shape and torch.equal(one, other)
        for rank in others
        for one, other in zip(first, rank, strict=True)
    ):
        return
    if reduces_after_clipping(step):
        return
    recorded = step.record.step(0, step.number)
    ranks = step.record.world_size
    place = recorded.backward_at[-1] if recorded.backward_at else Place()
    weights = [step.record.step(rank, step.number).weights for rank in range(ranks)]
    apart = any(one.get(name) != weights[0].get(name) for one in weights for name in names)
    more = ", and the ranks begin with different weights" if apart else ""
    yield Finding(
        cause="no_all_reduce",
        sentence="every rank trains alone: no gradient is reduced over the ranks",
        look_at="whether the model is wrapped in DistributedDataParallel at all",
        accepted=True,
        headline=f"every rank trains alone{more}",
        because="the optimizer of each rank gets the rank's own gradients, bit for bit",
        fix="wrap the model in DistributedDataParallel before it trains.",
        lines=lines_at(
            place,
            "the optimizer gets this rank's own gradients",
            missing="an average over all ranks, as DistributedDataParallel makes it",
        ),
    )


def _clipped_while_scaled(step: ObservedStep) -> Iterator[Finding]:
    for rank in range(step.record.world_size):
        for clip in step.record.step(rank, step.number).clips:
            if clip.scale == 1.0 or not clip.changed:
                continue
            scale = text_of(clip.scale, ".6g")
            limit = text_of(clip.limit, ".3g")
            really = text_of(clip.limit / clip.scale, ".2g")
            yield Finding(
                cause=WHILE_SCALED.name,
                sentence="gradients are clipped while they are still multiplied by the loss scale",
                look_at="the call of clip_grad_norm_: scaler.unscale_(optimizer) goes before it",
                accepted=True,
                headline=f"gradients are clipped while they are scaled by {scale}",
                because=f"clipping to {limit} limits the real norm to {really}",
                fix="call scaler.unscale_(optimizer) before the gradients are clipped.",
                lines=lines_at(
                    clip.place,
                    f"clips to {limit} what is scaled by {scale}: the norm is {really} afterwards",
                ),
            )
            return


def _same_rows(step: ObservedStep) -> Iterator[Finding]:
    ranks = step.record.world_size
    if ranks < 2 or any(row.row is None for row in step.rows):
        return
    read = [step.digests_of_rows(rank) for rank in range(ranks)]
    if any(one != read[0] for one in read) or not read[0]:
        return
    recorded = step.record.step(0, step.number)
    made = lines_at(recorded.earlier.loader, "its rows are the same on every rank")
    called = [
        lines_at(one.place, "is called with the same rows on every rank")
        for one in recorded.calls[:1]
    ]
    yield Finding(
        cause=SAME_DATA,
        sentence="all ranks read the same rows",
        look_at="the sampler or the seed: every rank must read rows of its own",
        accepted=True,
        headline="every rank reads the same rows",
        because=f"the batches of {ranks} ranks are equal, element for element",
        fix="give the loader a DistributedSampler, or seed the data by rank.",
        lines=made or (called[0] if called else ()),
    )


def clipped_otherwise(step: ObservedStep) -> Finding:
    """The gradients are right before they are clipped, and not afterwards."""
    clips = {
        rank: step.record.step(rank, step.number).clips for rank in range(step.record.world_size)
    }
    texts = {
        f"rank {rank}: to {text_of(one.limit, '.3g')}, norm {text_of(one.norm, '.3g')}"
        for rank, of_rank in clips.items()
        for one in of_rank
    }
    place = next((one.place for of_rank in clips.values() for one in of_rank), Place())
    return Finding(
        cause=CLIPPED_OTHERWISE,
        sentence="the gradients are right before they are clipped, and not afterwards",
        look_at="the norm and the limit with which each rank clips",
        accepted=True,
        headline="the gradients are right before they are clipped, and not afterwards",
        because="; ".join(sorted(texts)),
        fix="clip on every rank to the same limit, by the norm of the reduced gradients.",
        lines=lines_at(place, "; ".join(sorted(texts))),
    )


def micro_batches_added_up(step: ObservedStep, verdict: Verdict) -> Iterator[Finding]:
    """The script divides its micro-batches among the ranks, and adds their gradients up: what each
    rank holds is then a part of the sum that one process makes.
    """
    comparison, oracle = verdict.comparison, step.oracle
    ranks = step.record.world_size
    if comparison is None or oracle is None or oracle.arrangement != ONE_AFTER_THE_OTHER:
        return
    errors = [error for parameter in comparison.parameters for error in parameter.by_rank]
    if any(
        abs(error.factor * ranks - 1) > SAME_FACTOR or error.unexplained > SAME_FACTOR
        for error in errors
        if error.ratio > 0
    ):
        return
    if _knows_own(step) and not holds_the_mean_of_own(step):
        return  # the reduction is wrong, too
    recorded = step.record.step(0, step.number)
    passes = len(recorded.losses)
    all_passes = passes * ranks
    yield Finding(
        cause=ADDED_UP,
        sentence="the gradients of micro-batches are added up and not averaged",
        look_at="the loss of a micro-batch: it is divided by the number of micro-batches",
        accepted=True,
        headline="micro-batches are added up, so their number scales the gradient",
        because=f"a rank goes backward {passes} times in a step, one process {all_passes} times",
        fix="divide each loss by the number of micro-batches that this process has.",
        lines=lines_at(
            recorded.backward_at[0] if recorded.backward_at else Place(),
            f"runs {passes} times in a step here, and {all_passes} times in one process",
        ),
    )


def _knows_own(step: ObservedStep) -> bool:
    """False where ranks' own gradients are not seen, such as those of sharded parameters."""
    return all(
        None not in step.gradients(rank, OWN).values() for rank in range(step.record.world_size)
    )


def stale_gradients(step: ObservedStep) -> Iterator[Finding]:
    """Ranks went backward without having cleared the gradients of a step before, and the ranks
    hold the mean of these and of their own gradients.
    """
    ranks = range(step.record.world_size)
    stale = [step.gradients(rank, STALE) for rank in ranks]
    late = [rank for rank in ranks if any(one is not None for one in stale[rank].values())]
    if not late or not holds_the_mean_of_own(step, STALE):
        return
    where = "on every rank" if len(late) == len(ranks) else f"on {ranks_text(late)}"
    recorded = step.record.step(late[0], step.number)
    lines = _cleared_by_others(step, late) or lines_at(
        recorded.backward_at[0] if recorded.backward_at else Place(),
        f"adds to gradients that are there already {where}",
    )
    yield Finding(
        cause="stale_gradient_added",
        sentence="gradients of a step before are still there when the step goes backward",
        look_at="optimizer.zero_grad(), which every rank calls before each step",
        accepted=True,
        headline="gradients of a step before are added",
        because=f"{where}, .grad is not zero when the step first goes backward",
        fix="call optimizer.zero_grad() in every step, on every rank.",
        lines=lines,
    )


def _cleared_by_others(step: ObservedStep, late: Sequence[int]) -> tuple[PointedLine, ...]:
    """The line that clears gradients, if the ranks that are ``late`` do not run any such line."""
    cleared = {
        rank: step.record.step(rank, step.number).earlier.cleared
        for rank in range(step.record.world_size)
    }
    others = [rank for rank in cleared if rank not in late and str(cleared[rank])]
    if not others or any(str(cleared[rank]) for rank in late):
        return ()
    return lines_at(cleared[others[0]], f"clears gradients on {ranks_text(others)} only")


def text_of_clips(step: ObservedStep) -> str:
    """What was clipped, in words; "" for nothing."""
    clips = step.record.step(0, step.number).clips
    if not clips:
        return ""
    texts = []
    for clip in clips:
        norm = "" if math.isnan(clip.norm) else f", its norm was {text_of(clip.norm, '.3g')}"
        place = f"{clip.place}: " if str(clip.place) else ""
        texts.append(f"{place}clipped to {text_of(clip.limit, '.3g')}{norm}")
    return "; ".join(dict.fromkeys(texts))


# Finds the step in which optimizers that have the same gradients make different updates.

LENGTH_OF_DIGEST = 32


def weights_part(step: ObservedStep) -> Iterator[Finding]:
    """The finding, if trained weights differ between ranks that were equal before an earlier step,
    and so were their gradients. It names the option or the state of the optimizers that differed.
    """
    ranks = range(step.record.world_size)
    now = [step.record.step(rank, step.number).weights for rank in ranks]
    apart = [name for name in now[0] if len({one.get(name) for one in now}) > 1]
    for number in reversed(range(step.number)) if apart else ():
        readers = [step.record.reader(rank, number) for rank in ranks]
        if stepped := set(apart).intersection(readers[0].gradient_names("held/")):
            break
    else:
        return
    before = [reader.step for reader in readers]
    for name in stepped:
        first, *others = (reader.tensor(f"held/{name}") for reader in readers)
        alike = all(o is not None and first is not None and torch.equal(first, o) for o in others)
        if not alike or len({one.weights.get(name) for one in before}) > 1:
            return
    found, place = _what_differs(step, before, stepped)
    yield Finding(
        cause="optimizers_differ_between_ranks",
        sentence="ranks with the same weights and gradients make different updates",
        look_at="learning rates, options and state of the optimizer, which must not depend on rank",
        accepted=True,
        headline=f"weights are equal until step {number + 1}, in which the optimizers of the ranks "
        f"make different updates{found and f': {found}'}",
        fix="let all ranks make the same update: with the same options and state, decided from "
        "values that are reduced over the ranks, and loaded on every rank.",
        lines=lines_at(place, found or "weights differ after this step, and not before it"),
    )


def _what_differs(
    step: ObservedStep, before: Sequence[RecordedStep], stepped: Collection[str]
) -> tuple[str, Place]:
    """The first option or state of the optimizers that differs, in words, and the line of it."""
    by_rank = [one.earlier.steps_with for one in before]
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
    if not of.startswith("group "):
        loaded = [place for one in before if (place := one.earlier.state_loaded).file]
        return f"{option} of {step.short(of)} {text}", (*loaded, before[0].stepped_at)[0]
    return f"{option} of {of} {text}", _line_of(option, before[0])


def _line_of(option: str, before: RecordedStep) -> Place:
    """The last line that stepped a scheduler, else the only one that assigns the option, else the
    one that made the optimizer.
    """
    if option == "lr" and before.earlier.scheduled.file:
        return before.earlier.scheduled
    file = before.stepped_at.file
    assigns = re.compile(rf"""\[["']{re.escape(option)}["']\]\s*[-+*/]?=[^=]""")
    lines = Path(file).read_text(errors="replace").splitlines() if file else []
    found = [number for number, line in enumerate(lines, start=1) if assigns.search(line)]
    return Place(file, found[0]) if len(found) == 1 else before.earlier.optimizer
