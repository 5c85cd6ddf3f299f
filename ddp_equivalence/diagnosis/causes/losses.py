"""The ranks' losses count wrongly: by other divisors, or each for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isclose

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.divisors import (
    Amounts,
    WrongCount,
    counts_by_rank,
    is_weighted_mean,
    ratio_of_counts,
    what_it_divides_by,
    what_its_terms_divide_by,
)
from ddp_equivalence.diagnosis.examples_read import is_divided_up
from ddp_equivalence.diagnosis.hypothesis import (
    LOSS_ROUNDING,
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
    every_loss_is_the_big_batch_loss,
    indication_if,
    losses_close,
    losses_of_backwards,
    mean_loss_is_the_big_batch_loss,
    micro_batches_of_a_rank,
    on_several_ranks,
)
from ddp_equivalence.diagnosis.lines.of_loss import (
    last_backward,
    line_of_loss,
    line_that_multiplies_loss,
    line_that_scales_loss,
    losses_before,
)
from ddp_equivalence.diagnosis.lines.of_reduction import (
    averages,
    common_factor,
    in_own_backwards,
    is_unseen,
    line_of_reduction,
    line_that_scales_gradients,
    lines_that_set_groups,
)
from ddp_equivalence.diagnosis.lines.origins import divisors, is_times_a_count
from ddp_equivalence.diagnosis.lines.source import is_in_class, run_lines
from ddp_equivalence.diagnosis.lines.words import counted, first_of, in_order, last_of
from ddp_equivalence.diagnosis.means_of_parts import (
    Over,
    gradients_by_backward,
    means_over,
    nearest_mean,
)
from ddp_equivalence.diagnosis.reduced import groups_text, sum_is_right
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.whereabouts import MOST_LINES
from ddp_equivalence.measurement.calls import Contents, Kind
from ddp_equivalence.measurement.graph_watch import OwnBackward
from ddp_equivalence.strategies.sharded_batch import Indices

MOST_COUNTS = 8
"""With more ranks a report does not list how many examples each of them has."""

FEW_DIGITS = "2"
"""A number of so few digits may have been written down as it is."""


def leaves_no_factor(cause: str, view: View) -> bool:
    """True if the fix of this cause says all that becomes of the ranks' gradients: they are added
    up, and nothing divides the sum.
    """
    is_of_parts = cause in {one.name for one in UNEQUAL_MEANS[:2]}
    return is_of_parts and view.world_size > 1 and not (is_unseen(view) or averages(view))


def _divided_by_all(view: View, summed: str) -> str:
    """The mend of a loss that divides by a count of its own."""
    if view.world_size == 1:
        return f"{summed}."
    if is_unseen(view):
        return f"{summed}; under DDP, multiply it by {view.world_size} too."
    if averages(view):
        return f"{summed}, and multiply it by {view.world_size} (world size)."
    return f"{summed}, and add the ranks' gradients up."


def mend_examples(view: View) -> str:
    """Divide by what the big batch divides by, also where ranks read other examples than it has; ""
    if its loss is a sum.
    """
    count = view.setting.example_count
    halves = tuple(range(count // 2)), tuple(range(count // 2, count))
    gradients = torch.stack(list(map(view.examples.gradient, halves)))
    if nearly_equal(gradients.sum(0), view.expected):
        return ""
    if is_mean_over_examples(view, halves):
        return _divided_by_all(view, f"divide the sum of the examples' losses by {count}")
    return mend_counts(view)


def _lines_of_means(
    view: View, own: str, together: str = ": all count equally"
) -> Sequence[PointedLine]:
    """Where each rank takes a mean of its own, and where the means are averaged."""
    reduced = line_of_reduction(view, lambda seen: f"{seen}{together}")
    return in_order(view, line_of_loss(view, own, True), reduced)


def _mean_of_means(
    view: View, told: Callable[[Over], str] = lambda over: ""
) -> Sequence[Prediction]:
    """The mean of what the ranks contribute, unless that is the big batch's gradient.

    Each rank may take a mean of every micro-batch, or one mean of all of them. ``told``: what is
    said of means over these parts, if more than that they are.
    """
    setting = view.setting
    if view.parts.by_rank is None or view.parts.add_up_to_the_big_batch:
        return ()
    if setting.has_batch_norm or setting.batch_coupled or view.examples.draws_random_numbers:
        return ()
    means = means_over(view)
    plain = next(iter(means), None) is Over.MICRO_BATCH and Over.WINDOW not in means
    times, scaled = view.world_size, multiplies_wrong_means(view)
    found = []
    for over, mean in means.items():
        are_over = "" if plain and over is Over.MICRO_BATCH else f"the means are over {over.value}"
        held = view.on_every_rank(mean * times if scaled else mean)
        found.append(Prediction(held, told(over) or are_over))
    return tuple(found)


def multiplies_wrong_means(view: View) -> bool:
    """True if the loss was seen to be multiplied by the number of ranks, and the mean of what the
    ranks contribute is not the big batch's gradient. The factor is right then, and the count that
    the loss divides by is not.
    """
    contributions, count = view.parts.contributions(), view.world_size
    if contributions is None or nearly_equal(contributions.mean(0), view.expected):
        return False
    return count > 1 and line_that_scales_loss(view, count) is not None


def is_mean_over_examples(view: View, parts: Sequence[Indices] = ()) -> bool:
    """True if the big batch is the mean of the parts, each weighted by its examples. Without any,
    they are those that the ranks read.
    """
    parts = parts or [part for of_rank in view.parts.by_rank or () for part in of_rank if part]
    return bool(parts) and is_weighted_mean(view, parts, [len(part) for part in parts])


def _uneven_micro_batches(view: View) -> tuple[int, ...]:
    """How many examples the micro-batches of a rank have, if only these are uneven."""
    counts = {tuple(map(len, of_rank)) for of_rank in view.parts.by_rank or ()}
    if nearest_mean(view) is Over.WINDOW or len(counts) != 1:
        return ()
    sizes = counts.pop()
    return sizes if len(set(sizes)) > 1 else ()


def _lines_of_uneven(view: View) -> Sequence[PointedLine]:
    sizes = _uneven_micro_batches(view)
    if sizes:
        shown = ", ".join(map(str, sizes[:MOST_COUNTS])) + (", ..." if sizes[MOST_COUNTS:] else "")
        return _lines_of_means(view, f"means over {shown} examples, one by one", "")
    counts = [sum(map(len, of_rank)) for of_rank in view.parts.by_rank or ()]
    listed = ", ".join(map(str, counts)) if len(counts) <= MOST_COUNTS else ""
    own = f"means over {listed} examples, by rank" if listed else "each rank's own mean"
    return _lines_of_means(view, own)


def _of_counts(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' means, where a count of the batch makes their mean the big batch."""
    if is_mean_over_examples(view):
        return ()
    predictions = _mean_of_means(view, lambda over: unit_of_means(view, over) or "")
    return predictions if predictions and unit_of_means(view) is not None else ()


def unit_of_means(view: View, over: Over = Over.MICRO_BATCH) -> str | None:
    """What the loss divides by, in words, if each part's count of it gives the big batch.

    None if nothing does; "" for a loss that is known to divide by counts of its own.
    Parts with weights of their own would fit many a loss that is no mean, or that is random.
    """
    divisors = _divisors(view)
    each = " and by ".join(f"{one.unit} ({_by_part(view, one.counts, over)})" for one in divisors)
    if divisors:
        terms = f" has {len(divisors)} terms, which divide" if len(divisors) > 1 else " divides"
        return f"the loss{terms} by {each}"
    # A loss of the catalogue is a mean over its own counts, of one term or of several.
    return "" if isinstance(view.setting.case.loss, str) else None


def _divisors(view: View) -> list[Amounts]:
    """What the loss, or each of its terms, divides by; [] if it is no mean of its parts."""
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    divisor = what_it_divides_by(view, parts)
    return [divisor] if divisor is not None else what_its_terms_divide_by(view, parts)


def _by_part(view: View, counts: Sequence[float], over: Over = Over.MICRO_BATCH) -> str:
    """How much each part that the loss is a mean over has of what it divides by. ``counts``: those
    of each rank's micro-batches.
    """
    what = "micro-batch" if _of_micro_batches(view) else "rank"
    if over is not Over.MICRO_BATCH:
        each = iter(counts)
        by_rank = [[next(each) for _ in of_rank] for of_rank in view.parts.by_rank or ()]
        is_window = over is Over.WINDOW
        what = "rank" if is_window else "micro-batch of all ranks"
        counts = [sum(of) for of in (by_rank if is_window else zip(*by_rank, strict=True))]
    shown = ", ".join(text_of(one, ".4g") for one in counts[:MOST_COUNTS])
    more = ", ..." if counts[MOST_COUNTS:] else ""
    return f"by {what}: {shown}{more}"


def _of_micro_batches(view: View) -> bool:
    """True if the counts of micro-batches differ, and not only those of whole ranks."""
    several = any(len(parts) > 1 for parts in view.parts.by_rank or ())
    return several and nearest_mean(view) is not Over.WINDOW


def _lines_of_counts(view: View) -> Sequence[PointedLine]:
    whose = "count of one micro-batch" if _of_micro_batches(view) else "rank's own count"
    lines = _lines_of_means(view, f"divides by the {whose}")
    ran = {line for of_rank in view.observed.lines_run.values() for line in of_rank}
    seen = [
        PointedLine(one.line, f"divides here ({_by_part(view, one.counts, nearest_mean(view))})")
        for one in _divisors(view)
        if one.line in ran and one.line not in {shown.line for shown in lines}
    ]
    return [*seen, *(one for one in lines if view.world_size > 1 or one.is_fault)][:MOST_LINES]


def mend_counts(view: View) -> str:
    """Divide by the count of all ranks."""
    divisors = _divisors(view)
    unit = "count" if all(one.is_count for one in divisors) else "sum of the weights"
    if view.world_size == 1:
        return f"divide each micro-batch's summed loss by the {unit} of the whole window."
    window = "the whole window on " if _of_micro_batches(view) else ""
    what = "each term's sum by its" if len(divisors) > 1 else "the summed loss by the"
    return _divided_by_all(view, f"divide {what} {unit} of {window}all ranks")


def _of_nodes(view: View) -> Sequence[Prediction]:
    """The mean of the nodes' means, with the ranks of a node taken together or averaged."""
    nodes = view.setting.ranks_by_node
    if view.parts.by_rank is None or len(nodes) == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    sizes = {len(ranks) for ranks in nodes}
    if max(sizes) == 1:
        return ()  # Every node has one rank, which is left to other causes.
    if is_divided_up(view) is False:
        return ()  # The nodes hold no parts of the batch.
    candidates = []
    if _amounts(view) is not None or isinstance(view.setting.case.loss, str):
        means = [view.examples.gradient(examples) for examples in _examples_of_nodes(view)]
        candidates = [(torch.stack(means).mean(0), "")]
    if len(sizes) > 1:
        detail = "the mean of each node's ranks, then the mean of the nodes"
        for local in view.local_gradients:
            means = [local[list(ranks)].mean(0) for ranks in nodes]
            candidates.append((torch.stack(means).mean(0), detail))
    return tuple(
        Prediction(view.on_every_rank(mean), detail)
        for mean, detail in candidates
        if not nearly_equal(mean, view.expected)
    )


def _lines_of_nodes(view: View) -> Sequence[PointedLine]:
    """Where a loss adds up numbers of some ranks only; or where gradients are reduced inside the
    nodes, and between them.
    """
    in_groups = _sums_in_groups(view)
    if in_groups:
        last = in_groups[-1]
        note = f"adds up numbers of the ranks in {groups_text(last.groups)}, in the forward pass"
        return [*lines_that_set_groups(view, [last])[:1], last.pointed(note, True)]
    nodes = [set(ranks) for ranks in view.setting.ranks_by_node]
    between: list[CallSite] = []
    inside: list[CallSite] = []
    for place in view.observed.calls.reductions:
        joins = any(not any(node.issuperset(group) for node in nodes) for group in place.groups)
        (between if joins else inside).append(place)
    note = "joins the nodes, which count equally"
    joining = last_of(between, note) or first_of(view.observed.calls.places(Kind.WRAP), note)
    return [*last_of(inside, "reduces inside each node", is_fault=False), *joining]


def _sums_in_groups(view: View) -> list[CallSite]:
    """The lines that add up something else than gradients in a group of some ranks, before the last
    backward begins.
    """
    return view.observed.calls.collectives(
        lambda call, of: (
            of.op == "all_reduce"
            and of.contents is Contents.OTHER
            and 1 < len(of.ranks) < view.world_size
            and not call.in_backward
            and call.backwards < len(view.observed.backwards(0))
        )
    )


def _examples_of_nodes(view: View) -> list[tuple[int, ...]]:
    shards = view.parts.examples_by_rank
    return [
        tuple(index for rank in ranks for index in shards[rank])
        for ranks in view.setting.ranks_by_node
    ]


def _amounts(view: View) -> Amounts | None:
    """How much each node holds of what the big batch divides by, in which unit.

    None if all nodes hold equally much of it, or if it is not known.
    """
    parts = _examples_of_nodes(view)
    found = what_it_divides_by(view, parts)
    return None if found is None or max(found.counts) == min(found.counts) else found


def _ratios(view: View) -> list[WrongCount]:
    """The ratios that the gradients have, without those that may be a number that somebody wrote.

    0.5, 3 and 0.94 are ratios of two counts of many a batch. They need a division that was seen.
    """
    return [
        one
        for one in ratio_of_counts(view)
        if not _has_few_digits(one.factor) or _divided_by(view, one)
    ]


def _has_few_digits(factor: float) -> bool:
    return any(
        isclose(one, float(f"{one:.{FEW_DIGITS}g}"), rel_tol=1e-6) for one in (factor, 1 / factor)
    )


def _divided_by(view: View, wrong: WrongCount) -> float | None:
    """The number that gradients, or a loss that the rank had before, were seen to be divided by.

    It is the count itself, or the equal part of it that each of several ranks has. A rank that
    divides by its own right count has another cause.
    """
    count = wrong.counts[0]
    calls = [call for rank in view.observed.by_rank for call in view.observed.calls.of(rank)]
    if any(isclose((one.factor or 0.0) * count, 1.0, rel_tol=LOSS_ROUNDING) for one in calls):
        return count
    backward = last_backward(view)
    losses = losses_before(view, backward) if backward is not None else []
    seen = [
        earlier.value / later.value
        for place, later in enumerate(losses)
        for earlier in losses[:place]
        if later.what.startswith("DivBackward") and later.value and earlier.value
    ]
    layout = view.setting.layout
    numbers = {view.world_size, layout.nodes, view.parts.micro_batches_per_rank}
    part = count / view.world_size if wrong.of_all else count
    wanted = [one for one in (count, part) if one not in numbers]
    found = (of for of in wanted for one in seen if isclose(one, of, rel_tol=LOSS_ROUNDING))
    return next(found, None)


def _division_seen(view: View) -> Indication | None:
    """Looks for the division itself, or else for losses that have the factor already."""
    ratios = _ratios(view)
    for one in ratios:
        seen = _divided_by(view, one)
        if seen is not None:
            part = "" if seen == one.counts[0] else ", the part of one rank,"
            return Indication(True, f"a division by {text_of(seen, '.6g')}{part} was seen")
    common = common_loss_factor(view)
    for one in ratios:
        if common is not None and losses_close(common, one.factor):
            times = text_of(one.factor, ".4g")
            return Indication(True, f"every backward began at {times} times the loss of its rows")
    return None


def _wrong_and_right(view: View, ratio: WrongCount) -> tuple[str, str]:
    """The count, and the right one; on each of several ranks, the equal parts that ranks have."""
    seen = _divided_by(view, ratio)
    part = 1.0 if seen is None else seen / ratio.counts[0]
    return text_of(part * ratio.counts[0], ".6g"), text_of(part * ratio.total, ".6g")


def _detail(view: View, ratio: WrongCount) -> str:
    """What each rank's part counts is not told: several counts may be the same multiple of it."""
    seen = _divided_by(view, ratio)
    if seen in (None, ratio.counts[0]):  # what was not seen may count so many by chance
        return f"{'as if ' if seen is None else ''}{ratio.text}"
    total = text_of(ratio.total, ".6g")
    wrong, right = _wrong_and_right(view, ratio)
    in_all = f"in all there are {total}, {ratio.right_unit}"
    return f"divided by {wrong} on each rank, instead of {right}; {in_all}"


def _lines_of_another_count(view: View) -> Sequence[PointedLine]:
    """Where the loss or the gradients are divided, and where the divisor comes from."""
    ratios, own = _ratios(view), counts_by_rank(view)
    note = f"as if divided by the rank's {own[0].unit}" if own else ""
    if ratios:
        wrong, right = _wrong_and_right(view, ratios[0])
        note = f"as if divided by {wrong}; the right count is {right}"
    found = (line_that_scales_gradients(view, 1 / one.counts[0]) for one in ratios)
    scaled = next(filter(None, found), None) or line_of_loss(view, note, True)
    if scaled is None:
        return ()
    run = run_lines(view, min(view.observed.by_rank, default=0))
    made = [
        PointedLine(
            link.line, f"{link.gives}, which goes into the number at line {scaled.line.number}"
        )
        for link in divisors(run, scaled.line)[:1]
        if link.line != scaled.line
    ]
    return in_order(view, *made, scaled, line_of_reduction(view) if own and not ratios else None)


def _mend_another_count(view: View) -> str:
    ratios, own = _ratios(view), counts_by_rank(view)
    if ratios:
        (wrong, right), unit = _wrong_and_right(view, ratios[0]), ratios[0].right_unit
        seen, total = _divided_by(view, ratios[0]), text_of(ratios[0].total, ".6g")
        if seen is None:
            return f"multiply the loss by {wrong} / {right}; {right} is the right count ({unit})."
        part = ratios[0].counts[0] / seen  # of several ranks, each may have an equal part of it
        over = "" if part == 1 else f" / {text_of(part, '.6g')}"
        return f"divide by {total}{over} ({unit}), not by {wrong}."
    if not own:
        return "divide by what the loss of the big batch divides by."
    total = text_of(own[0].total, ".6g")
    return _divided_by_all(
        view, f"divide the summed loss by {total} ({own[0].right_unit}, on all ranks)"
    )


def _every_normaliser(view: View) -> Sequence[WrongFactor]:
    """Every number that the mean may divide by, with and without an average over the ranks.

    Each of them also with an average over the micro-batches of a rank, where it has several.
    """
    if view.parts.add_up_to_the_big_batch:
        return ()
    ranks, details = view.world_size, dict[float, str]()
    for passes in sorted({1, micro_batches_of_a_rank(view)}):
        divided, named = (f" / {passes}", " / micro-batches") if passes > 1 else ("", "")
        for unit, count in view.setting.divisor_candidates.items():
            averaged = f"{count:g} / {ranks}{divided} ({unit} / ranks{named})"
            added = f"{count:g}{divided} ({unit}{named}), and added over the ranks"
            details.setdefault(count / ranks / passes, f"too large by the factor {averaged}")
            details.setdefault(count / passes, f"too large by the factor {added}")
    return [WrongFactor(value, detail) for value, detail in details.items() if value not in (0, 1)]


def _no_sum_of_losses(view: View) -> Indication | None:
    """Compares the losses at which backward began with the means over the examples read, and looks
    for a line that multiplies a loss by a number that nobody counted.
    """
    common, run = common_loss_factor(view), run_lines(view)
    scaled = line_that_multiplies_loss(view, common) if common is not None else None
    if scaled is not None and not is_times_a_count(run, scaled.line):
        return Indication(False, f"line {scaled.line.number} multiplies the loss by this number")
    pairs = losses_of_backwards(view)
    ratios = [value / own for value, own in pairs or () if own]
    if ratios and all(losses_close(ratio, 1.0) for ratio in ratios):
        return Indication(False, "backward began at the mean over the rank's own examples")
    if _losses_make_up_the_big_batch(view):
        return Indication(False, "the losses at which backward began make up the big batch's")
    if sum_is_right(view):
        return Indication(False, "the sum of what the ranks computed is the big batch's gradient")
    return None


def _losses_make_up_the_big_batch(view: View) -> bool:
    """True if the ranks' losses add up to the big batch's, or if their mean is this, or that of all
    their micro-batches.
    """
    by_rank = [
        [call.loss for call in view.observed.backwards(rank)] for rank in view.observed.by_rank
    ]
    if not view.observed.covers_every_rank or any(None in one or not one for one in by_rank):
        return False
    total = sum(one for of_rank in by_rank for one in of_rank if one is not None)
    right = view.examples.big_batch_loss
    counts = {1, view.world_size, sum(map(len, by_rank))}
    return any(losses_close(total / count, right) for count in counts)


def _lines_of_sum(view: View) -> Sequence[PointedLine]:
    factor = common_factor(view)
    note = "a sum, not a mean" + (f": {text_of(factor, '.6g')} times too large" if factor else "")
    return in_order(view, line_of_loss(view, note, True), line_of_reduction(view))


def _mend_summed(view: View) -> str:
    factor, ratio = common_factor(view), common_loss_factor(view)
    if factor is None:
        return 'take the mean over the rank\'s own examples: reduction="mean", not "sum".'
    by = text_of(factor, ".6g")
    one_pass = ratio is not None and losses_close(factor, ratio)
    mean = ", as the mean does," if one_pass else ""
    return f"the loss is a sum: divide it by {by}{mean} before backward."


# Every rank computes the loss of the whole batch, but only its own part carries a gradient.


def _own_part_alone(view: View) -> Sequence[WrongFactor]:
    if not (view.setting.batch_coupled or every_loss_is_the_big_batch_loss(view)):
        return ()
    detail = f"each of the {view.world_size} ranks adds only its own part of the gradient"
    return (WrongFactor(1 / view.world_size, detail),)


def _loss_of_the_whole_batch(view: View) -> Indication | None:
    """Compares the losses at which backward began with the loss of the whole batch."""
    if _compares_own_rows(view):
        because = (
            "backward began at losses whose mean is that of the whole batch, and which are not "
            "those of the ranks' own examples alone"
        )
        return Indication(True, because, conclusive=True)
    if in_own_backwards(view):
        return Indication(False, "a backward method passes gradients on to other ranks")
    if losses_of_backwards(view) is None:
        return None
    return indication_if(
        every_loss_is_the_big_batch_loss(view),
        "backward began at the loss of the whole batch on every rank",
        "backward did not begin at the loss of the whole batch",
    )


def _compares_own_rows(view: View) -> bool:
    """True if each rank computes the loss of its own examples against the outputs of all ranks,
    which a collective brought that passes no gradient on.

    What the ranks then hold cannot be predicted: the loss of the case is one number for all
    examples. It is a sum over the examples of a part that every rank computes of its own, so the
    mean of the ranks' losses is right.
    """
    calls = (call for rank in view.observed.by_rank for call in view.observed.calls.of(rank))
    passes_on = any(  # the backward pass of a gather of torch.distributed.nn.functional
        one.collective and one.in_backward and one.collective.contents is Contents.OTHER
        for one in calls
    )
    if not any("gather" in place.op for place in _gathers(view)) or passes_on:
        return False
    if every_loss_is_the_big_batch_loss(view) or not mean_loss_is_the_big_batch_loss(view):
        return False
    gradients = gradients_by_backward(view)
    if gradients is None or not view.measured.is_known:
        return False
    mean = torch.stack(gradients).sum(0).mean(0)  # nothing is wrong after backward
    return all(nearly_equal(held, mean) for held in view.measured.by_rank)


def _gathers(view: View) -> list[CallSite]:
    """The lines whose collectives bring outputs of other ranks into a forward pass."""
    places = view.observed.calls.collectives(
        lambda call, of: (
            not call.in_backward
            and call.backwards < len(view.observed.backwards(0))
            and ("gather" in of.op or of.op == "all_reduce")
            and of.contents is Contents.OTHER
            and (of.elements > 1 or of.loses_gradient)
        )
    )
    # One element beside more of them is a loss, which is summed for a log.
    return [place for place in places if _elements(place) > 1] or places


def _elements(place: CallSite) -> int:
    return 0 if place.first.collective is None else place.first.collective.elements


def _loses(place: CallSite) -> bool:
    return any(call.collective and call.collective.loses_gradient for call in place.calls)


def _lines_that_gather(view: View) -> Sequence[PointedLine]:
    """The collective in the forward pass, and the loss that is computed from what it returns."""
    gathers, is_own = _gathers(view), _compares_own_rows(view)
    if is_own:
        gathers = [place for place in gathers if "gather" in place.op]  # a sum brings no rows
    losing = [place for place in gathers if _loses(place)]
    own_backwards = [] if losing else _own_backwards(view)[:1]
    for own in own_backwards:  # another one may gather what needs no gradient
        gathers = [one for one in gathers if is_in_class(one.line, own.name)] or gathers
    pointed = []
    for place in (losing or gathers)[-1:]:
        count = _elements(place)
        verb = "requires" if count == 1 else "require"
        note = f", which {verb} a gradient; what it returns has none" if losing else ""
        note = f"{place.op} of {counted(count, 'element')}{note}"
        pointed.append(place.pointed(note, is_fault=True))
    note = "begins at the loss of the whole batch on every rank"
    if is_own:
        note = "begins at the loss of this rank's examples against all ranks' outputs"
    shown = [*pointed, *last_of(view.observed.calls.backwards, note, is_fault=not pointed)]
    for own in own_backwards:
        what = f"the gradient that {own.name} gives back; no collective ran in backward"
        others = (replace(one, is_fault=False) for one in shown)
        return [PointedLine(own.line, what, is_fault=True), *others]
    return shown


def _own_backwards(view: View) -> list[OwnBackward]:
    """The backward methods of those functions of the user's whose forward pass gathered.

    [] if a collective ran in a backward pass.
    """
    seen = view.observed.by_rank.get(0)
    if seen is None or any(call.collective and call.in_backward for call in seen.calls):
        return []
    ways = [
        line
        for place in _gathers(view)
        for call in place.calls
        for line in (place.line, *call.callers)
    ]
    return [
        one
        for one in seen.own_backwards
        if one.step == view.setting.step and any(is_in_class(line, one.name) for line in ways)
    ]


def _weighted_in_the_loss(view: View) -> Indication | None:
    """Speaks against means that count equally, where the losses are weighted as they should be."""
    because = "backward began at losses whose mean is the big batch's, so their weights are right"
    return Indication(False, because) if mean_loss_is_the_big_batch_loss(view) else None


UNEQUAL_MEANS = (
    Hypothesis(
        name="uneven_shards_weighted_equally",
        sentence="Ranks, or their micro-batches, have different numbers of examples, and their "
        "means count equally.",
        look_at="the divisor of the loss: divide the summed loss by the number of examples on all "
        "ranks; under DDP, also multiply it by the world size",
        headline="uneven parts count equally",
        tell_apart="Give all ranks equally many examples: only this difference then goes away.",
        held=lambda view: _mean_of_means(view) if is_mean_over_examples(view) else (),
        indication=_weighted_in_the_loss,
        lines=_lines_of_uneven,
        mend=mend_examples,
        limits_must_catch=True,
        wrong_divisor=True,
    ),
    Hypothesis(
        name="token_counts_weighted_equally",
        sentence="Every loss divides by the count of its own part of the batch (tokens, weights, "
        "positives), and these means count equally.",
        look_at="the divisor of the loss: all-reduce the count, and multiply the summed loss by "
        "world size / count",
        headline="means over unequal counts weigh equally",
        tell_apart="Give all ranks equal counts: only this difference then goes away.",
        held=_of_counts,
        indication=_weighted_in_the_loss,
        lines=_lines_of_counts,
        mend=mend_counts,
        limits_must_catch=True,
        wrong_divisor=True,
    ),
    Hypothesis(
        name="mean_of_node_means",
        sentence="The nodes hold different amounts of data, and the means of the nodes count "
        "equally.",
        look_at="the average between nodes: weight each node by the number that its loss divides "
        "by",
        headline="node means count equally, nodes differ",
        tell_apart="Use nodes with several ranks, and equally many on each: only this difference "
        "then goes away.",
        held=_of_nodes,
        lines=_lines_of_nodes,
        mend="weight the {nodes} nodes by what their losses divide by, not equally.",
        limits_must_catch=True,
    ),
)

ANOTHER_COUNT = Hypothesis(
    name="divided_by_another_count",
    sentence="The loss divides by another count of the batch than the loss of the big batch does.",
    look_at="the divisor of the loss: it must count what the loss of the big batch counts "
    "(examples, or tokens that are not ignored), in the whole window and on all ranks",
    headline="the loss divides by another count",
    tell_apart="Use another batch with another number of examples or tokens: the factor changes.",
    held=lambda view: [
        Prediction(view.on_every_rank(one.held), one.text) for one in counts_by_rank(view)
    ],
    multiples=lambda view: [WrongFactor(one.factor, _detail(view, one)) for one in _ratios(view)],
    indication=_division_seen,
    lines=_lines_of_another_count,
    mend=_mend_another_count,
    guess="A division by another count of the batch",
    seen=lambda view: not _ratios(view) or _division_seen(view) is not None,
    wrong_divisor=True,
)

GATHER_WITHOUT_GRADIENT = Hypothesis(
    name="gather_without_gradient",
    sentence="A collective in the forward pass passes no gradient to other ranks, so that an "
    "example gets the gradient of the loss of its own rank only.",
    look_at="dist.all_gather or dist.all_reduce in the forward pass: they pass no gradient on; "
    "use the functions of torch.distributed.nn.functional, which do",
    headline="a collective passes no gradient on",
    tell_apart="Print the loss of each rank: here it is the loss of the whole batch.",
    applies=on_several_ranks,
    multiples=_own_part_alone,
    indication=_loss_of_the_whole_batch,
    lines=_lines_that_gather,
    mend="use a collective of torch.distributed.nn.functional.",
    of_a_number=True,
)

LOCAL_LOSS_SUMMED = Hypothesis(
    name="local_loss_summed",
    sentence="Each rank's loss is the sum over its own examples; the big batch's is their mean.",
    look_at='the reduction of the loss: "sum" where "mean" is meant, or a mean in some places only',
    headline="the loss is summed, not averaged",
    tell_apart="Use another number of examples: no other cause has a factor that changes with it.",
    multiples=_every_normaliser,
    indication=_no_sum_of_losses,
    lines=_lines_of_sum,
    mend=_mend_summed,
    of_a_number=True,
    wrong_divisor=True,
)
