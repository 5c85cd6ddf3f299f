"""All gradients have one wrong factor: a sum where a mean is meant, or another divisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes.losses import (
    is_mean_over_examples,
    multiplies_wrong_means,
    unit_of_means,
)
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
    every_loss_is_the_big_batch_loss,
    losses_close,
    on_every_rank,
)
from ddp_equivalence.diagnosis.lines.of_loss import line_that_multiplies_loss, line_that_scales_loss
from ddp_equivalence.diagnosis.lines.of_reduction import (
    averages,
    by_hand,
    common_factor,
    ddp_reduces,
    in_hook,
    in_own_backwards,
    is_unseen,
    line_of_reduction,
    line_that_scales,
    line_that_scales_gradients,
    lines_of_factor,
    lines_of_hook_divisors,
)
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.reduced import sum_is_right, sums_repeated
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.own_gradient import backward_alone_is_wrong
from ddp_equivalence.measurement.calls import Call, Contents, Kind

EQUAL = 1e-4
"""Two factors are equal if they differ by less, relative to the larger one. A divisor is a whole
number if it is as near to one."""

OTHER_WORLD_SIZE = "Use another world size: no other cause has a factor that changes with it."


def _is_common(view: View, factor: float) -> bool:
    held = common_factor(view)
    return held is not None and _equal(held, factor)


def _also_on_one_rank(view: View, factor: float) -> Indication | None:
    """Speaks against a cause that ranks bring about, if one rank leaves the same factor.

    None if all gradients on all ranks have another factor, and if one rank's is not known.
    """
    alone = view.factor_on_one_rank() if _is_common(view, factor) else None
    if alone is None or not _equal(alone, factor):
        return None
    times = text_of(factor, ".4g")
    because = f"on one rank with the whole batch the step leaves {times} times as much, too"
    return Indication(False, because)


def _equal(factor: float, other: float) -> bool:
    return abs(factor - other) <= EQUAL * max(abs(factor), abs(other))


def _scaled(view: View, factor: float) -> str:
    """The "gradients" or the "loss", if a line was seen to multiply them by this number."""
    if line_that_scales_gradients(view, factor) is not None:
        return "the gradients"
    return "the loss" if line_that_scales_loss(view, factor) is not None else ""


def _averages_once(view: View) -> bool:
    """True where several ranks' gradients should be averaged once, not added up."""
    return view.world_size > 1 and not view.parts.add_up_to_the_big_batch


def _backwards_of_a_rank(view: View) -> int:
    return max(len(view.observed.backwards(rank)) for rank in view.observed.by_rank)


def _mean_of_a_sum(view: View) -> Sequence[Prediction]:
    """The mean of parts that add up to the big batch, over all ranks or only over the nodes."""
    contributions, total = view.parts.contributions(), view.parts.total()
    if contributions is None or total is None or view.parts.count == 1:
        return ()
    # Every part has the gradient of the data-independent terms; the big batch has it only once.
    constant = view.examples.data_independent_gradient()
    data = total if constant is None else total - view.parts.count * constant
    big_batch = data if constant is None else data + constant
    # Unlike add_up_to_the_big_batch, this also holds if one part has all the data.
    adds_up = nearly_equal(total, view.expected) and _is_a_sum(view)
    adds_up_but_for_constant = constant is not None and nearly_equal(big_batch, view.expected)
    if not adds_up and not adds_up_but_for_constant:
        return ()
    mean_of_ranks = on_every_rank(view, contributions.mean(0))
    nodes = view.setting.layout.nodes
    if nodes == 1:
        return mean_of_ranks
    between = big_batch - data * (1 - 1 / nodes)
    return *mean_of_ranks, *on_every_rank(view, between, detail="averaged only between the nodes")


def _is_a_sum(view: View) -> bool:
    """True if the parts add up because the loss is a sum, not because only one part has any data.

    Of a mean, a part that has all the data is the big batch too; but its halves do not add up.
    """
    if view.parts.add_up_to_the_big_batch:
        return True
    gradient = view.examples.gradient
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    with_data = [(one, len(one) // 2) for one in parts if bool(gradient(one).any())]
    return all(
        not half or nearly_equal(gradient(one[:half]) + gradient(one[half:]), gradient(one))
        for one, half in with_data
    )


def _averaged_over_ranks(view: View) -> Sequence[WrongFactor]:
    if view.world_size == 1 or not view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(1 / view.world_size, f"divided by {view.world_size}, the number of ranks"),)


def _lines_that_average(view: View) -> Sequence[PointedLine]:
    """Where the loss is summed, and where the gradients are averaged."""
    count = view.world_size
    if by_hand(view) or in_hook(view):
        return lines_of_factor(view, 1 / count)
    return lines_of_factor(
        view, 1 / count, "a sum over examples", missing=f"a multiplication by {count}"
    )


def _mend_mean(view: View) -> str:
    """A line that divides a sum is left out; else the loss is multiplied by what is missing."""
    count, factor = view.world_size, common_factor(view)
    what = _scaled(view, 1 / count) if factor is None or _equal(factor, 1 / count) else ""
    if what and not averages(view):
        return f"do not divide {what} by {count}: the loss is a sum."
    return f"multiply the loss by {text_of(1 / (factor or 1 / count), '.6g')}: it is a sum."


def _sum_of_ranks(view: View) -> Sequence[Prediction]:
    """The sum of what the ranks contribute, and the world size times the big batch."""
    sums = [view.world_size * view.expected]
    contributions = view.parts.contributions()
    if contributions is not None:
        sums.append(contributions.sum(0))
        constant = view.examples.data_independent_gradient()
        if constant is not None:
            # The data-independent terms may have been kept out of the sum.
            sums.append(contributions.sum(0) - (view.world_size - 1) * constant)
    return on_every_rank(view, *sums)


def _sum_is_nearer(view: View) -> bool:
    """True if the loss is a sum over examples, of which the mean over ranks would be too small."""
    contributions = view.parts.contributions()
    constant = view.examples.data_independent_gradient()
    if contributions is None or constant is not None:
        return False  # a penalty is added up as often as there are ranks, beside a right sum
    of_sum, of_mean = contributions.sum(0) - view.expected, contributions.mean(0) - view.expected
    return bool(of_sum.norm() < of_mean.norm())


def _added_over_ranks(view: View) -> Sequence[WrongFactor]:
    return (WrongFactor(view.world_size, f"multiplied by {view.world_size}, the number of ranks"),)


def _no_sum(view: View) -> Indication | None:
    """Speaks against a sum if what differs was divided, or went into several sums.

    Also against it if one rank, which has nothing to add up, leaves the same factor.
    """
    count, differing = view.world_size, view.measured.differing
    if differing and differing <= set(sums_repeated(view)):
        return Indication(False, "the gradients that differ went into several sums over all ranks")
    if multiplies_wrong_means(view) and (
        is_mean_over_examples(view) or unit_of_means(view) is not None
    ):
        return Indication(False, f"the factor {count} goes with the count of all ranks")
    if sum_is_right(view) and line_that_scales_gradients(view, count) is None:
        return Indication(False, "the sum of what the ranks computed is the big batch's gradient")
    if _sum_is_nearer(view) and line_that_scales_gradients(view, count) is None:
        why = "the sum of what the ranks computed is nearer to the big batch than the mean"
        return Indication(False, why)
    divided = {name for one in view.observed.calls.multiplied_by(1 / count) for name in one.names}
    if view.measured.only_some_parameters_differ and differing <= divided:
        return Indication(False, f"a line divides these gradients by {count}")
    return _also_on_one_rank(view, count)


def _lines_that_add_up(view: View) -> Sequence[PointedLine]:
    """Where gradients are added up, and where they or the loss are multiplied."""
    count = view.world_size
    divided = line_that_scales(view, 1 / count)
    if divided is not None and line_that_scales(view, count) is None:
        return in_order(view, line_of_reduction(view), replace(divided, is_fault=False))
    # What becomes of a copy of the gradients is not watched.
    in_place = by_hand(view) and all(
        place.first.collective is not None and place.first.collective.contents is Contents.GRADIENTS
        for place in by_hand(view)
    )
    undivided = "; no line divides them" if in_place else ""
    missing = f"a division of {_the_wrong(view)} by {count}"
    return lines_of_factor(view, count, note=lambda seen: f"{seen}{undivided}", missing=missing)


def _mend_sum(view: View) -> str:
    count, what = view.world_size, _scaled(view, view.world_size)
    if what:
        contributions = view.parts.contributions()
        right = contributions is None or nearly_equal(contributions.mean(0), view.expected)
        why = f": DDP averages over the {count} ranks by itself" if ddp_reduces(view) else ""
        again = "" if right else " The mean over the ranks is another gradient, too: check again."
        return f"do not multiply {what} by {count}{why}.{again}"
    if view.observed.calls.places(Kind.DIVIDE_FACTOR):
        return BY_ITSELF
    if is_unseen(view):
        these = _the_wrong(view)
        return f"divide {these} by {count}, the ranks, or do not multiply the loss by it."
    where = "in the hook" if in_hook(view) and not by_hand(view) else "after the reduction"
    return f"divide {_the_wrong(view)} by {count}, the number of ranks, {where}."


def _the_wrong(view: View) -> str:
    """The gradients that are wrong, which the report names if they are not all."""
    return "these gradients" if view.measured.only_some_parameters_differ else "the gradients"


BY_ITSELF = (
    "leave set_gradient_divide_factor out: it is for one module alone, and FSDP averages by itself."
)


FOR_EACH = (
    "call set_gradient_divide_factor on each module that fully_shard was given: it is for one "
    "module alone."
)


def _mend_twice(view: View) -> str:
    """The division that is one too many is left out."""
    count, what = view.world_size, _scaled(view, 1 / view.world_size)
    if view.observed.calls.places(Kind.DIVIDE_FACTOR):
        divides = f"do not divide {what} by {count}, and " if what else ""
        return FOR_EACH if sum_is_right(view) else divides + BY_ITSELF
    if what and averages(view):
        return f"do not divide {what} by {count}: DDP and ReduceOp.AVG average by themselves."
    if _divided_again(view):
        return f"leave out one of the two divisions by {count}."
    if averages(view):
        return f"divide by {count} once, not twice: DDP, ReduceOp.AVG and FSDP do it by themselves."
    return f"leave out a division by {count}, or multiply the gradients by {count}."


def _divided_once_more(view: View) -> Sequence[Prediction]:
    """The big batch, or the mean of what the ranks contribute, divided by the world size."""
    means = [view.expected]
    contributions = view.parts.contributions()
    if contributions is not None:
        means.append(contributions.mean(0))
    return on_every_rank(view, *(mean / view.world_size for mean in means))


def _one_over_ranks(view: View) -> Sequence[WrongFactor]:
    detail = f"divided by {view.world_size}, the number of ranks, once more"
    return (WrongFactor(1 / view.world_size, detail),)


def _no_second_division(view: View) -> Indication | None:
    """Speaks against it if a loss over gathered outputs, backward, or one rank has the factor."""
    gathered = view.observed.a_rank_gathered and not in_own_backwards(view)
    if gathered and every_loss_is_the_big_batch_loss(view):
        because = "every rank's loss is that of the whole batch, which explains the factor"
        return Indication(False, because)
    if backward_alone_is_wrong(view):
        because = "the ranks hold the mean of what they computed, and began at the right losses"
        return Indication(False, because)
    return _also_on_one_rank(view, 1 / view.world_size)


def _divided_loss(view: View) -> PointedLine | None:
    """The line that divides the loss by the number of ranks; None if its loss is the right one."""
    line = line_that_scales_loss(view, 1 / view.world_size)
    common = common_loss_factor(view)
    if line is None or common is None:
        return line
    return None if losses_close(common * _backwards_of_a_rank(view), 1.0) else line


def _divisions(view: View) -> list[PointedLine]:
    """The lines that divide the loss, or all gradients, by the number of ranks, the first first."""
    loss, places = _divided_loss(view), view.observed.calls.multiplied_by(1 / view.world_size)
    found = [] if loss is None else [loss]
    for place in places:
        changed = [name for call in place.calls for name in (call.change or call).names]
        times = min(map(changed.count, view.measured.differing), default=0)
        often = f", and some of them {times} times" if times > 1 else ""
        note = f"divides the gradients by {view.world_size}{often}"
        found += [place.pointed(note, is_fault=True)] * times
    return found


def _divided_again(view: View) -> bool:
    """True if a division by the number of ranks was seen, beside one that is right."""
    return len(_divisions(view)) > (0 if averages(view) else 1)


def _lines_that_divide_twice(view: View) -> Sequence[PointedLine]:
    """Where the gradients are averaged, and where they or the loss are divided once more."""
    divisions = _divisions(view)
    if _divided_again(view):
        *others, last = divisions
        before = replace(others[-1], is_fault=False) if others and not averages(view) else None
        return in_order(view, before or line_of_reduction(view), last)
    if len(view.measured.differing) < len(view.parameters.names):
        note = "sets by what FSDP divides, in this module alone: not in those sharded inside it"
        of_fsdp = view.observed.calls.places(Kind.DIVIDE_FACTOR)
        if of_fsdp:
            return [place.pointed(note, is_fault=True) for place in of_fsdp]
    own = in_own_backwards(view) if not divisions else []
    if own:
        note = f"{own[-1].op} in a backward method: it may be the sum of the whole gradient already"
        return in_order(view, own[-1].pointed(note, True), line_of_reduction(view))
    by = 1 / view.world_size
    is_written = view.observed.calls.multiplied_by(by) or line_that_multiplies_loss(view, by)
    counts = _counts_of_all_ranks(view) if not is_written else []
    if counts:
        note = "adds up a number of all ranks; the ranks' losses add up to that of the big batch"
        return in_order(view, counts[-1].pointed(note, True), line_of_reduction(view))
    shown = replace(divisions[-1], is_fault=False) if divisions else None
    # What a communication hook does to its bucket is not watched; nothing else divides.
    hides = not divisions and bool(in_hook(view)) and not by_hand(view)
    return in_order(view, line_of_reduction(view, is_fault=hides), shown)


def _counts_of_all_ranks(view: View) -> list[CallSite]:
    """The lines that add up one number of all ranks in a forward pass, if the ranks' losses add up
    to that of the big batch: what they are divided by is then a count of all ranks.
    """
    if not view.observed.covers_every_rank:
        return []
    losses = [one.loss for rank in range(view.world_size) for one in view.observed.backwards(rank)]
    known = [one for one in losses if one is not None]
    if not losses_close(sum(known), view.examples.big_batch_loss) or len(known) < len(losses):
        return []
    return view.observed.calls.collectives(
        lambda call, of: (
            of.op == "all_reduce"
            and of.elements <= 1  # whole numbers are not counted
            and of.contents is Contents.OTHER
            and not call.in_backward
            and call.backwards < len(view.observed.backwards(0))
        )
    )


# A division by the ranks of one node, or by a number that is not that of the ranks.


def _divided_by_own_node(view: View) -> Sequence[Prediction]:
    """The sum of the local gradients, divided by the number of ranks on each rank's own node."""
    if view.setting.layout.nodes == 1:
        return ()
    sizes = [row.local_world_size for row in view.setting.layout.rows]
    divisors = torch.tensor(sizes, dtype=view.expected.dtype)[:, None]
    return tuple(
        Prediction(view.on_reporting_ranks(local.sum(0) / divisors))
        for local in view.local_gradients
        if nearly_equal(local.mean(0), view.expected)  # dividing by all ranks would be right
    )


def _nodes_of_equal_size(view: View) -> Sequence[WrongFactor]:
    layout = view.setting.layout
    sizes = {row.local_world_size for row in layout.rows}
    if len(sizes) > 1 or layout.nodes == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(view.world_size / sizes.pop(), "all ranks over the ranks of a node"),)


def _local_world_size(view: View) -> int:
    """The number of ranks on the node of the lowest rank that was observed."""
    return view.setting.layout.rows[min(view.observed.by_rank, default=0)].local_world_size


def _division_by_node(view: View) -> Indication | None:
    """Looks for a line that divides by the ranks of a node; a factor on one rank is not theirs."""
    local = _local_world_size(view)
    for one in _nodes_of_equal_size(view):
        alone = _also_on_one_rank(view, one.value)
        if alone is not None:
            return alone
        if _is_that_of_losses(view, one.value):
            return Indication(False, "the losses at which backward began have this factor already")
        divided = line_that_scales_gradients(view, 1 / local)
        line = None if divided is None else divided.line
        at_the_line = view.observed.calls.changes(lambda call: call.factor is not None)
        calls = (call for place in at_the_line if place.line == line for call in place.calls)
        if any(not losses_close(call.factor or 0.0, 1 / local) for call in calls):
            return Indication(False, "the same line divides other gradients by other numbers")
        # With one rank on a node there is nothing to divide, and with one node it is right.
        if local > 1 and divided is not None:
            return Indication(True, f"the gradients were divided by {local}, the ranks of one node")
    return None


def _is_that_of_losses(view: View, factor: float) -> bool:
    """True if each rank's losses together are this multiple of the loss of its rows."""
    common, held = common_loss_factor(view), common_factor(view)
    if common is None or held is None or not losses_close(held, factor):
        return False
    return losses_close(common * _backwards_of_a_rank(view), factor)


def _lines_that_divide_by_node(view: View) -> Sequence[PointedLine]:
    """Where the gradients are added up, and where they are divided."""
    in_its_hook = [replace(one, is_fault=True) for one in _divisors_in_hook(view)]
    if in_its_hook:
        return in_order(view, line_of_reduction(view), *in_its_hook)
    return lines_of_factor(view, 1 / _local_world_size(view))


def _divisors_in_hook(view: View) -> list[PointedLine]:
    hooks = view.observed.calls.places(Kind.HOOK)[-1:]
    return [line for hook in hooks for line in lines_of_hook_divisors(view, hook)]


def _mend_by_node(view: View) -> str:
    count, local = view.world_size, _local_world_size(view)
    if line_that_scales(view, 1 / local) is not None or _divisors_in_hook(view):
        return f"divide by {count}, dist.get_world_size(), not by {local}, the ranks of one node."
    return f"divide the gradients by {text_of(count / local, '.6g')} more."


def _wrong_divisor(view: View) -> int | None:
    """The number that every rank was seen to divide by; None if it is the right one, or unknown.

    A number that other causes explain is left to them.
    """
    by_rank = [
        {_divisor(call) for call in view.observed.calls.of(rank)} - {None}
        for rank in view.observed.by_rank
    ]
    divisors = set.intersection(*by_rank) if by_rank else set()
    if len(divisors) != 1 or view.parts.add_up_to_the_big_batch or not _all_ranks_add_up(view):
        return None
    divisor = divisors.pop()
    if divisor is None or divisor == view.world_size:
        return None
    others = (*AVERAGED_TWICE.factors(view), *LOCAL_WORLD_SIZE.factors(view))
    factor = view.world_size / divisor
    return None if any(abs(one.value / factor - 1) < EQUAL for one in others) else divisor


def _divisor(call: Call) -> int | None:
    """The whole number that this call divided gradients by; None if it did not."""
    if call.factor is None or not 0 < call.factor < 1:
        return None
    number = round(1 / call.factor)
    return number if abs(1 / call.factor - number) < EQUAL * number else None


def _all_ranks_add_up(view: View) -> bool:
    """True if gradients were added up over all ranks, and nothing else was done with them."""
    reduced = [
        call.collective
        for rank in view.observed.by_rank
        for call in view.observed.calls.of(rank)
        if reduces_gradients(call)
    ]
    return bool(reduced) and all(
        one is not None and one.reduce_op == "SUM" and len(one.ranks) == view.world_size
        for one in reduced
    )


def _ranks_over_divisor(view: View) -> Sequence[WrongFactor]:
    divisor = _wrong_divisor(view)
    if divisor is None:
        return ()
    detail = f"divided by {divisor}, where there are {view.world_size} ranks"
    return (WrongFactor(view.world_size / divisor, detail),)


def _one_divisor(view: View) -> Indication | None:
    divisor = _wrong_divisor(view)
    if divisor is None:
        return None
    return Indication(True, f"every rank divided its gradients by {divisor}")


MEAN_NOT_SUM = Hypothesis(
    name="mean_not_sum",
    sentence="The loss is a sum over examples, and the gradients were averaged over the ranks.",
    look_at="the reduction of the loss: under DDP, multiply a summed loss by the world size",
    headline="a summed loss is averaged over ranks",
    tell_apart=OTHER_WORLD_SIZE,
    held=_mean_of_a_sum,
    multiples=_averaged_over_ranks,
    indication=lambda view: _also_on_one_rank(view, 1 / view.world_size),
    lines=_lines_that_average,
    mend=_mend_mean,
    limits_must_catch=True,
    wrong_divisor=True,
)

SUM_NOT_MEAN = Hypothesis(
    name="sum_not_mean",
    sentence="The ranks hold the sum of their gradients, not the mean: too large by the factor "
    "of their number.",
    look_at="a loss that is multiplied by the world size under DDP, which averages by itself; the "
    "factor after the last all_reduce; a communication hook that sums and does not average",
    headline="gradients are a sum, not a mean",
    tell_apart=OTHER_WORLD_SIZE,
    applies=_averages_once,
    held=_sum_of_ranks,
    multiples=_added_over_ranks,
    indication=_no_sum,
    lines=_lines_that_add_up,
    mend=_mend_sum,
    limits_must_catch=True,
    of_a_number=True,
    wrong_divisor=True,
)

AVERAGED_TWICE = Hypothesis(
    name="averaged_twice",
    sentence="Gradients were divided once too often by a number equal to the number of ranks.",
    look_at="a division by the world size in the loss or after backward: DDP already averages",
    headline="gradients are divided once too often",
    tell_apart=OTHER_WORLD_SIZE,
    applies=_averages_once,
    held=_divided_once_more,
    multiples=_one_over_ranks,
    indication=_no_second_division,
    lines=_lines_that_divide_twice,
    mend=_mend_twice,
    guess="A second division by the number of ranks",
    seen=_divided_again,
    limits_must_catch=True,
    wrong_divisor=True,
)

LOCAL_WORLD_SIZE = Hypothesis(
    name="divided_by_local_world_size",
    sentence="Gradients were added over all ranks and divided by the number of ranks on one node.",
    look_at="a divisor taken from LOCAL_WORLD_SIZE or torch.cuda.device_count(): "
    "use dist.get_world_size() instead",
    headline="gradients are divided by local world size",
    tell_apart="Use nodes with several ranks, such as 2x4, where the numbers of nodes, of ranks on "
    "a node and of all ranks differ.",
    held=_divided_by_own_node,
    multiples=_nodes_of_equal_size,
    indication=_division_by_node,
    lines=_lines_that_divide_by_node,
    of_a_number=True,
    mend=_mend_by_node,
    guess="A division by the ranks of one node, in place of all ranks,",
    seen=lambda view: line_that_scales(view, 1 / _local_world_size(view)) is not None,
    wrong_divisor=True,
)

WRONG_NUMBER = Hypothesis(
    name="divided_by_wrong_number",
    sentence="Gradients were added over all ranks and divided by a number that is not the number "
    "of ranks.",
    look_at="where the divisor comes from: a configuration or an environment variable of another "
    "run; use dist.get_world_size() instead",
    headline="gradients are divided by another number",
    tell_apart="Use another world size: the factor changes with it.",
    multiples=_ranks_over_divisor,
    indication=_one_divisor,
    lines=lambda view: lines_of_factor(view, 1 / (_wrong_divisor(view) or 1)),
    of_a_number=True,
    mend=lambda view: (
        f"divide by {view.world_size}, dist.get_world_size(), not by {_wrong_divisor(view)}."
    ),
)
