"""The big batch with the random numbers that the ranks drew, so that only other faults are left."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model, without_dropout
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.tolerance import relative_to
from ddp_equivalence.diagnosis.causes.model import OTHER_DRAWS, SAME_DRAWS, step_set_the_same_seed
from ddp_equivalence.diagnosis.diagnose import (
    Finding,
    diagnose,
    finding_from_observation,
    without_rounding,
)
from ddp_equivalence.diagnosis.draw_table import Draws, DrawTable, Part, joined_draws, table_of
from ddp_equivalence.diagnosis.example_gradients import ExampleGradients
from ddp_equivalence.diagnosis.hypothesis import limits_by_name
from ddp_equivalence.diagnosis.residual import nearly_equal, unexplained
from ddp_equivalence.diagnosis.setting import PointedLine, Setting
from ddp_equivalence.diagnosis.time_left import DRAWS
from ddp_equivalence.diagnosis.view import MeasuredGradients, View
from ddp_equivalence.diagnosis.where.pieces import Pieces, pieces_of, rows_by_rank, same_loss
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.draws import DrawLog
from ddp_equivalence.measurement.observation import Indices
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.reference import in_dtype, train

# The second run records what every rank drew. Each rank's own gradient is then computed again
# from its rows and these numbers, on one device. If it is the gradient that the rank was seen to
# compute, the same numbers are given to the big batch, each example's to this example. What still
# differs then is no matter of random numbers, whatever drew them, on whatever device.

MOST_WRONG = 0.5
"""At most this part of the ranks' backward passes may have computed something else than their rows
and numbers give: this is then a fault of their own.
"""


@dataclass(frozen=True)
class DrawnView:
    """``view``: of the step, with the numbers that the ranks drew in the big batch as well."""

    view: View
    table: DrawTable

    @property
    def nothing_else_differs(self) -> bool:
        """True if the big batch with these numbers is what every rank holds."""
        return not self.view.measured.differing

    def compared(self, comparison: Comparison) -> Comparison:
        """The same comparison with this big batch, on the elements that are kept."""
        measured, parameters = self.view.measured, []
        for one in comparison.parameters:
            place = self.view.parameters.places.get(one.key[1], slice(0))
            right = measured.expected[place]
            if not len(right) or len(one.by_rank) != len(measured.by_rank):
                parameters.append(one)  # nothing of it is kept, or not of every rank
                continue
            norm = float(right.norm())
            beside = torch.sqrt(right.square().mean()).clamp_min(torch.finfo(right.dtype).tiny)
            errors = []
            for of_rank, held in zip(one.by_rank, measured.by_rank[:, place], strict=True):
                away = held - right
                distance = float(away.norm())
                element = float((away.abs() / right.abs().maximum(beside)).max())
                within = one.key[1] not in measured.differing and element <= one.limit.element
                error = relative_to(distance, norm)
                errors.append(
                    replace(of_rank, distance=distance, error=error, element=element, within=within)
                )
            parameters.append(replace(one, norm=norm, by_rank=tuple(errors)))
        return replace(comparison, parameters=tuple(parameters))

    @property
    def lines_of_rank_0(self) -> list[CodeLine]:
        """The lines under which rank 0 drew these numbers, each once, in their order."""
        lines = [one.line for part in self.table.parts if part.rank == 0 for one in part.draws]
        return list(dict.fromkeys(line for line in lines if line is not None))


def drawn_view(view: View, comparison: Comparison, reference: ReferenceDraws) -> DrawnView | None:
    """The view in which the big batch draws what the ranks drew; None if that is not known.

    ``reference``: what the big batch draws by itself.
    """
    if not view.observed.records_draws or view.setting.step > 0:  # recorded in the first step
        return None
    return view.time.within(DRAWS, lambda: _drawn_view(view, comparison, reference), None)


def _drawn_view(view: View, comparison: Comparison, reference: ReferenceDraws) -> DrawnView | None:
    pieces, parts = pieces_of(view), _parts(view, reference)
    if pieces is None or parts is None or reference.axes is None:
        return None
    table = table_of(parts, reference.draws, reference.axes, view.setting.example_count)
    if table is None:
        return None
    examples = _big_batch(replace(view.examples, cache={}, draws=table), table)
    if examples is None or not _is_what_was_drawn(view, pieces, examples, table):
        return None
    return DrawnView(_view(view, comparison, examples, table), table)


def _big_batch(examples: ExampleGradients, table: DrawTable) -> ExampleGradients | None:
    """The examples with the big batch that has these numbers; None if it is not known.

    The order of the examples must not matter, or the numbers do not belong to single examples.
    """
    divided = _divided_as_the_big_batch(examples, table)
    if divided is None:
        return None
    everything = tuple(range(len(table.owners)))
    expected = divided.compute(everything).gradient
    turned = divided.compute(everything[::-1]).gradient
    if not bool(expected.isfinite().all()) or not nearly_equal(expected, turned):
        return None
    return replace(divided, expected=expected)


def _parts(view: View, reference: ReferenceDraws) -> list[Part] | None:
    rows = rows_by_rank(view)
    found: list[Part] = []
    for rank, seen in sorted(view.observed.by_rank.items()):
        drawn: list[tuple[Draws, ...]] = []
        for number in range(len(view.observed.backwards(rank))):
            joined = joined_draws([one for one in seen.draws or () if one.piece == number])
            if joined is None or len(joined) < len(reference.draws):
                return None
            # What a sampler or the step draws for itself comes before the loss.
            drawn.append(tuple(joined[len(joined) - len(reference.draws) :]))
        examples: Sequence[Indices] | None = rows[rank]
        if len(rows[rank]) != len(drawn):
            examples = _dealt(view, rank, drawn, reference)
        if examples is None:
            return None
        found += [
            Part(rank, number, *of_part)
            for number, of_part in enumerate(zip(examples, drawn, strict=True))
        ]
    return found


def _dealt(
    view: View, rank: int, drawn: Sequence[Sequence[Draws]], reference: ReferenceDraws
) -> list[Indices] | None:
    """The examples that the rank was given, dealt to its backward passes in their order.

    How many each has read follows from the shapes of what was drawn.
    """
    shards, count = view.setting.shards, view.setting.example_count
    by_example = [
        (number, axis) for number, axis in enumerate(reference.axes or ()) if axis is not None
    ]
    if shards is None or not by_example:
        return None
    number, axis = by_example[0]
    of_all = reference.draws[number].values.shape
    if any(draws[number].values.ndim != len(of_all) for draws in drawn):
        return None
    sizes = [count * draws[number].values.shape[axis] // of_all[axis] for draws in drawn]
    ends = list(accumulate(sizes))
    if not ends or ends[-1] != len(shards[rank]):
        return None
    return [tuple(shards[rank][end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _is_what_was_drawn(
    view: View, pieces: Pieces, examples: ExampleGradients, table: DrawTable
) -> bool:
    """True if the numbers give what the ranks computed.

    They give the gradients of most backward passes, which may be multiplied by a number, or one
    that other numbers do not give. If every rank computes another gradient, they give the losses of
    all backward passes, and other numbers do not.
    """
    fitting, with_other_numbers = 0, 0
    right_losses = True
    for part in table.parts:
        backward = view.observed.backwards(part.rank)[part.number]
        seen = backward.gradient
        here = examples.with_draws(part.examples, table.of_part(part))
        there = view.examples.compute(part.examples)
        begun = backward.loss or 0.0
        right_losses &= same_loss(begun, here.loss) and not same_loss(begun, there.loss)
        if seen is None or len(seen) != len(view.expected):
            continue
        found = view.setting.scale * seen
        if pieces.factor_between(found, here.gradient) is not None:
            fitting += 1
            with_other_numbers += pieces.factor_between(found, there.gradient) is not None
    if fitting > with_other_numbers or fitting >= (1 - MOST_WRONG) * len(table.parts):
        return True
    return right_losses and bool(table.parts)


def _divided_as_the_big_batch(
    examples: ExampleGradients, table: DrawTable
) -> ExampleGradients | None:
    """The examples whose gradients add up to those of more examples; None if none are known to.

    Numbers that are drawn once for all examples of a part cannot be given to the big batch. It is
    then computed part by part, if parts that draw the same make up the big batch.
    """
    if not table.differs_by_part:
        return examples
    everything = tuple(range(len(table.owners)))
    groups = table.groups(everything)
    whole, *alone = (
        examples.with_draws(some, table.draws_for(some, groups[0][0])).gradient
        for some in (everything, *(group for _, group in groups))
    )
    for adds_up in (False, True):
        candidate = replace(examples, adds_up=adds_up)
        total = torch.stack(
            [
                candidate.weight_of(len(group), len(everything)) * one
                for (_, group), one in zip(groups, alone, strict=True)
            ]
        ).sum(0)
        if nearly_equal(total, whole):
            return candidate
    return None


def _view(view: View, comparison: Comparison, examples: ExampleGradients, table: DrawTable) -> View:
    """The view with this big batch, and with what the ranks left when these numbers were drawn."""
    measured = view.measured.by_rank
    if view.observed.left_other_bits:
        measured = torch.stack(
            [
                _joined(view, view.observed.by_rank[rank].left)
                for rank in view.setting.reporting_ranks
            ]
        )
    limits = limits_by_name(comparison)
    differing = frozenset(
        name
        for name, place in view.parameters.places.items()
        if not _is_same(measured[:, place], examples.expected[place], limits.get(name, 0.0))
    )
    read = tuple(
        tuple(part.examples for part in table.parts if part.rank == rank)
        for rank in range(view.world_size)
    )
    observed = view.observed
    if observed.examples_read is None:
        observed = replace(observed, examples_computed=read)
    parts = replace(view.parts, examples=examples)
    if not view.setting.case.is_catalogue and view.parts.by_rank != read:
        parts = replace(parts, by_rank=read)
    return replace(
        view,
        examples=examples,
        parts=parts,
        measured=MeasuredGradients(measured, differing, examples.expected, view.parameters),
        observed=observed,
    )


def _joined(view: View, left: Mapping[str, Tensor]) -> Tensor:
    return view.setting.scale * view.parameters.sample.joined(left)


def _is_same(measured: Tensor, expected: Tensor, limit: float) -> bool:
    away, most = (measured - expected).norm(dim=1), limit * float(expected.norm())
    return bool(((away <= most) | (away == 0)).all())  # the limit of a zero gradient is infinite


MOST_LINES = 2

SEEN = (
    "from its rows and the numbers that it drew, each rank's own gradient was computed again, and "
    "the big batch with these numbers gives what the ranks hold"
)


def right_but_for_draws(
    request: Request, drawn: DrawnView | None, comparison: Comparison
) -> Comparison | None:
    """The comparison with a big batch that draws the ranks' numbers, if a user's own step is right
    with them; None if it is not, if all ranks were given the same seed, or if the model is so large
    that only some of its elements are kept.
    """
    one_step = request.step_count == 1 and not request.trains
    if drawn is None or not (request.is_the_users_own and one_step):
        return None
    if not drawn.view.parameters.sample.is_whole:
        return None
    if step_set_the_same_seed(drawn.view):
        return None  # the rows of two ranks are to draw other numbers
    with_numbers = drawn.compared(comparison)
    return with_numbers if with_numbers.same else None


def findings_of_drawn(drawn: DrawnView, comparison: Comparison) -> tuple[Finding, ...]:
    """The random numbers alone, if nothing else differs; otherwise the causes of what differs."""
    if not drawn.nothing_else_differs:
        return diagnose(drawn.view, comparison)
    view, because = drawn.view, SEEN
    hypothesis = OTHER_DRAWS
    if step_set_the_same_seed(view):
        hypothesis = SAME_DRAWS
        because = f"the step set the same seed on all ranks before its forward pass; {SEEN}"
    lines = tuple(hypothesis.lines(view))
    if not lines:
        lines = tuple(
            PointedLine(line, "rank 0 drew here", is_fault=True)
            for line in drawn.lines_of_rank_0[:MOST_LINES]
        )
    left = unexplained(view.measured.by_rank, view.expected_by_rank)
    finding = replace(
        finding_from_observation(hypothesis, because),
        accepted=True,
        unexplained=without_rounding(left),
        lines=lines,
        fix=hypothesis.fix(view),
    )
    return (finding,)


@dataclass(frozen=True)
class ReferenceDraws:
    """``axes``: for each draw, the dimension along which examples stand; None if it is drawn once
    for all examples. ``axes`` itself is None if other numbers cannot be given to the big batch.
    """

    draws: tuple[Draws, ...]
    axes: tuple[int | None, ...] | None


def draws_of_the_big_batch(setting: Setting) -> ReferenceDraws | None:
    """What the reference draws; None if it draws nothing, or more than is recorded.

    A part of the batch shows which dimensions belong to the examples.
    """
    count = setting.example_count
    draws = _drawn(setting, count)
    if not draws:
        return None
    some = count // 2
    of_some = _drawn(setting, some) if some else draws
    return ReferenceDraws(draws, _axes(draws, of_some, count, some))


def _axes(
    draws: tuple[Draws, ...], of_some: tuple[Draws, ...], count: int, some: int
) -> tuple[int | None, ...] | None:
    if [one.name for one in draws] != [one.name for one in of_some]:
        return None
    axes: list[int | None] = []
    for whole, part in zip(draws, of_some, strict=True):
        big, small = whole.values.shape, part.values.shape
        differing = [axis for axis, size in enumerate(big) if small[axis : axis + 1] != (size,)]
        if len(big) != len(small) or len(differing) > 1:
            return None
        axis = differing[0] if differing else None
        if axis is not None and (big[axis] % count or big[axis] * some != small[axis] * count):
            return None
        axes.append(axis)
    return tuple(axes)


def _drawn(setting: Setting, examples: int) -> tuple[Draws, ...]:
    """What is drawn for the first of the examples."""
    log = DrawLog()
    case = setting.case
    batch = take(setting.batch, tuple(range(examples)), case.batch_dims)
    with without_planted_faults(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half of the batch may be too few for the loss
        model = build_model(case).to(setting.computed_in)
        try:
            with log.watching():
                batch = in_dtype(batch, setting.computed_in)
                train(case, model, [batch], "gradients", setting.training)
        except BadCase:
            return ()
    return tuple(joined_draws(log.draws) or ()) if log.complete else ()


# Dropout on a GPU, whose generator draws other masks than that of the CPU.
#
# The reference is computed on the CPU, so no gradient of a rank that drops something on a GPU can
# be predicted from it, and the step is judged once more with dropout turned off.

ON_A_GPU = "a GPU draws other masks than the CPU, on which the big batch was computed"

ONLY_MASKS = (OTHER_DRAWS.name,)
"""The causes of a step in which nothing but what is drawn differs."""


def request_without_masks(request: Request) -> Request | None:
    """The same request with dropout turned off; None if the step may not run again."""
    if request.in_process or not request.second_look:
        return None
    return replace(request, case=without_dropout(request.case))


def are_the_same_on_all_ranks(view: View | None) -> bool:
    """True if the step was seen to give all ranks the same seed."""
    return view is not None and bool(step_set_the_same_seed(view))


def finding_of_masks(view: View | None) -> Finding:
    """The masks as the only cause, since the step is right without dropout."""
    hypothesis = OTHER_DRAWS
    seen = f"{ON_A_GPU}; with dropout turned off, the same step gives the big batch's gradient, so "
    seen += "the reduction is right"
    if are_the_same_on_all_ranks(view):
        hypothesis = SAME_DRAWS
        seen = f"the step set the same seed on all ranks before its forward pass; {seen}"
    return replace(finding_from_observation(hypothesis, seen), accepted=True)


def findings_beside_masks(findings: Sequence[Finding], view: View | None) -> tuple[Finding, ...]:
    """The findings of the step without dropout, and beside each that is accepted, the masks."""
    masks = finding_of_masks(view)
    return tuple(_beside(one, masks) if one.accepted else one for one in findings)


def _beside(finding: Finding, masks: Finding) -> Finding:
    """The finding with the masks as one more cause."""
    seen = f"{ON_A_GPU}; with dropout turned off, this cause remains"
    if finding.more:
        seen = f"{ON_A_GPU}; with dropout turned off, the other causes remain"
    return replace(
        finding,
        because="; ".join(filter(None, (finding.because, seen))),
        more=(*finding.more, masks),
    )
