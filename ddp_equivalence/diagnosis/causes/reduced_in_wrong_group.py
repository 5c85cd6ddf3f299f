"""Gradients were reduced in groups of ranks that no other reduction joins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, ranks_by_number
from ddp_equivalence.diagnosis.lines.lines_of_wrapping import (
    hooks_of_all_steps,
    lines_of_hook_state,
    lines_of_small_groups,
)
from ddp_equivalence.diagnosis.lines.of_data import lines_that_replace_rows
from ddp_equivalence.diagnosis.reduced import Groups, groups_text, separate_groups, wrapped_groups
from ddp_equivalence.diagnosis.setting import PointedLine, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The mean or the sum of the gradients of each rank's own group, where groups were seen."""
    return means_of_groups(view, groups_seen(view))


def groups_seen(view: View) -> Groups:
    """The groups of the step's own reductions, or those of DDP unless these are the nodes.

    What DDP reduces in each node alone is another cause.
    """
    of_ddp = wrapped_groups(view)
    nodes = tuple(sorted(view.setting.ranks_by_node))
    return separate_groups(view) or (() if of_ddp == nodes else of_ddp)


def means_of_groups(view: View, groups: Groups) -> Sequence[Prediction]:
    """The mean or the sum of the gradients of the ranks in each rank's own group."""
    if not groups or not view.setting.every_rank_reports:
        return ()
    predictions = []
    for local in view.local_gradients:
        sums = torch.empty_like(local)
        sizes = torch.empty(view.world_size, 1, dtype=local.dtype)
        for group in groups:
            ranks = list(group)
            sums[ranks] = local[ranks].sum(0)
            sizes[ranks] = len(ranks)
        divisors = (
            (sizes, "each group divides by its own size"),
            (view.world_size, f"each group divides by {view.world_size}, the number of all ranks"),
            (1, "nothing is divided"),
        )
        predictions += [
            Prediction(view.on_reporting_ranks(sums / divisor), detail)
            for divisor, detail in divisors
        ]
    return tuple(predictions)


def indication(view: View) -> Indication | None:
    """Looks at the groups in which gradients were seen to be reduced."""
    groups = groups_seen(view)
    if not groups:
        return None
    if lines_that_replace_rows(view):
        return Indication(False, "a collective gave ranks the rows of others")
    several = tuple(group for group in groups if len(group) > 1)
    alone = [group[0] for group in groups if len(group) == 1]
    because = f"gradients were reduced in {groups_text(groups)}; none joins them"
    if alone and several:
        because = f"gradients were reduced in {groups_text(several)}; {ranks_by_number(alone)} "
        because += f"reduced {'theirs' if len(alone) > 1 else 'its own'} with no other rank"
    return Indication(True, because)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the groups are made, and where gradients are reduced in them."""
    calls = view.observed.calls
    used = {tuple(sorted(group)) for place in calls.reductions for group in place.groups}
    made = calls.places(Kind.NEW_GROUP, where=lambda call: tuple(sorted(call.ranks)) in used)
    reduced = [
        place.pointed(
            f"{len(place.calls)} {place.first.collective.op}, in {groups_text(place.groups)}; "
            f"none has all {view.world_size} ranks",
            is_fault=True,
        )
        for place in calls.reductions
        if place.first.collective is not None
    ]
    if not reduced:
        return lines_of_wrapper(view)
    return [*(place.pointed() for place in made[:1]), *reduced[:2]]


def lines_of_wrapper(view: View) -> Sequence[PointedLine]:
    """Where the groups are made, and where DDP or its communication hook is given one."""
    calls = view.observed.calls
    sharded = lines_of_small_groups(view)
    if sharded:
        return sharded
    if hook_has_the_group(view):
        hooks = hooks_of_all_steps(view)[-1:]
        note = "the hook reduces in a group of some ranks"
        return lines_of_hook_state(view) or [one.pointed(note, is_fault=True) for one in hooks]
    of_step = StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})
    made = [place.pointed() for place in of_step.places(Kind.NEW_GROUP)[:1]]
    wrapped = of_step.places(Kind.WRAP) or calls.backwards
    note = "DDP reduces in a group of some ranks"
    return [*made, *(place.pointed(note, is_fault=True) for place in wrapped[-1:])]


def hook_has_the_group(view: View) -> bool:
    """True if DDP itself has all ranks, and was given a communication hook."""
    sizes = [wrapper.logged.get("world_size") for wrapper in view.observed.wrappers]
    has_all = bool(sizes) and all(size == view.world_size for size in sizes)
    return has_all and bool(hooks_of_all_steps(view))


def fix(view: View) -> str:
    """Reduce over all ranks."""
    if hook_has_the_group(view):
        return f"let the communication hook reduce over all {view.world_size} ranks."
    if not view.observed.calls.reductions:
        return "give DistributedDataParallel no process_group, or one of all ranks."
    return f"all_reduce over all {view.world_size} ranks, and divide by {view.world_size}."


HYPOTHESIS = Hypothesis(
    name="reduced_in_wrong_group",
    sentence="Gradients were reduced only within groups of ranks, and nothing joins these groups.",
    look_at="the process group that is given to all_reduce, and what joins the groups afterwards",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone may not decide: look at the group of each all_reduce.",
    headline="gradients stay within groups of ranks",
    lines=lines,
    fix=fix,
)
