"""A hypothesis predicts what every rank would hold, from one explanation of a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torch import Tensor

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.request import Request


@dataclass(frozen=True)
class Prediction:
    """What the ranks would hold if a cause had come about in one particular way.

    ``by_rank``: shape (reporting ranks, elements). ``detail``: the ranks, micro-batches or numbers
    that the prediction is about, as a clause of the report. ``fitted``: some numbers of the
    prediction were taken from the measurement. It is then believed only if no other one fits.
    """

    by_rank: Tensor
    detail: str = ""
    fitted: bool = False


@dataclass(frozen=True)
class WrongFactor:
    """A number that the right gradient may have been multiplied by. ``detail`` says what it is."""

    value: float
    detail: str


@dataclass(frozen=True)
class Indication:
    """What the observations say about a cause.

    ``supports``: True if they speak for the cause, False if they speak against it. ``because``:
    what was observed, as a clause of the report. ``conclusive``: True if the cause is believed even
    without a prediction that fits, unless a prediction of another cause fits.
    """

    supports: bool
    because: str
    conclusive: bool = False


def on_every_rank(view: View, *gradients: Tensor, detail: str = "") -> tuple[Prediction, ...]:
    """All ranks hold one of these gradients, each of shape (elements,)."""
    return tuple(Prediction(view.on_every_rank(one), detail) for one in gradients)


def on_any_layout(view: View) -> bool:
    """A cause may come about on every layout."""
    return True


def on_several_ranks(view: View) -> bool:
    """A cause needs several ranks."""
    return view.world_size > 1


def where_all_report(view: View) -> bool:
    """A cause needs several ranks, and can be told only if all of them say what they hold."""
    return view.world_size > 1 and view.setting.every_rank_reports


def _nothing(view: View) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Hypothesis:
    """One explanation of a difference: a row in the table of a family of causes.

    ``sentence`` says what happened, ``look_at`` where in the code to look. ``tell_apart``: the
    change of the case after which no other cause leaves the same numbers. ``headline``: the
    sentence in at most seven words, in lower case, as the first line of a report has it.

    ``held(view)``: what the ranks would hold, for each way in which the cause can come about; empty
    where it cannot be the cause. ``multiples(view)``: the numbers that this cause may multiply the
    right gradient by; empty if it does something else. A cause with factors can come together with
    another cause. Neither is asked unless ``applies(view)``. ``indication(view)``: what the
    observations say about the cause; None if they say nothing.

    ``mend``: what to write instead, as an imperative on one line, in which ``{ranks}``, ``{nodes}``
    and ``{examples}`` are their numbers, ``{averaged}`` says that what is reduced is to be the
    mean, where the step may have divided it, and ``{divided}`` says to divide by the number of
    ranks where a mean is right; or a function that writes it. ``lines(view)``: at most
    three lines of the user's code that show what happened, in the order in which they ran; they are
    asked for only if the cause is believed. ``guess``: the beginning of what a report says instead
    of the sentence and the headline, unless the cause was ``seen(view)``.

    ``limits_must_catch``: the limits of every comparison must be narrow enough to catch what
    ``predict`` gives. ``invalidates_gradients``: where an indication supports this cause, the
    gradients of the ranks cannot be compared with any prediction, and no other cause is considered.

    What kind of mistake it is: ``of_a_number``: its faulty line multiplies or divides by a number.
    ``wrong_divisor``: the right divisor corrects it, so that its report says whose mean the big
    batch is. ``of_rows``: it says itself which examples were read again, or by none.
    ``of_optimizer``: gradients are right, and weights are not.
    """

    name: str
    sentence: str
    look_at: str
    headline: str = ""
    tell_apart: str = ""
    applies: Callable[[View], bool] = on_any_layout
    held: Callable[[View], Sequence[Prediction]] = _nothing
    multiples: Callable[[View], Sequence[WrongFactor]] = _nothing
    indication: Callable[[View], Indication | None] = lambda view: None
    lines: Callable[[View], Sequence[PointedLine]] = _nothing
    mend: str | Callable[[View], str] = ""
    guess: str = ""
    seen: Callable[[View], bool] = on_any_layout
    limits_must_catch: bool = False
    invalidates_gradients: bool = False
    of_a_number: bool = False
    wrong_divisor: bool = False
    of_rows: bool = False
    of_optimizer: bool = False

    def predict(self, view: View) -> Sequence[Prediction]:
        """What the ranks would hold, for each way in which the cause can come about."""
        return self.held(view) if self.applies(view) else ()

    def factors(self, view: View) -> Sequence[WrongFactor]:
        """The numbers that this cause may multiply the right gradient by."""
        return self.multiples(view) if self.applies(view) else ()

    def fix(self, view: View) -> str:
        """What to write instead, as an imperative on one line."""
        if callable(self.mend):
            return self.mend(view)
        return self.mend.format(
            ranks=view.world_size,
            nodes=view.setting.layout.nodes,
            examples=view.setting.example_count,
            divided=divided_by_ranks(view),
            averaged=", as the mean over all ranks" if divided_by_ranks(view) else "",
        )


# Whether a prediction explains the difference of every parameter, also of those with small ones.
#
# Judged on all elements together, a small head would vanish beside a large body.

MOST_LEFT = 0.4
"""The part of a parameter's difference that an explanation may leave."""

MULTIPLE = 4.0
"""It may also leave this many times the parameter's limit."""

LimitByName = Mapping[str, float]
"""Parameter -> the limit of its error, relative to the norm of its gradient."""


def limits_by_name(comparison: Comparison) -> LimitByName:
    """The relative limit of every parameter, the widest of all steps."""
    limits: dict[str, float] = {}
    for parameter in comparison.parameters:
        relative = parameter.limit.absolute / parameter.norm if parameter.norm > 0 else inf
        limits[parameter.key[1]] = max(relative, limits.get(parameter.key[1], 0.0))
    return limits


def explains_every_parameter(view: View, predicted: Tensor, limits: LimitByName) -> bool:
    """True if the prediction leaves little of the difference of each parameter that differs.

    ``predicted``: shape (reporting ranks, elements).
    """
    measured, expected = view.measured.by_rank, view.expected
    for name, place in view.parameters.places.items():
        if name not in view.measured.differing or place.start == place.stop:
            continue
        own, right = measured[:, place], expected[place]
        difference = float((own - right).nan_to_num(0.0).norm())
        left = float((own - predicted[:, place]).nan_to_num(0.0).norm())
        limit = limits.get(name, 0.0) * float(right.norm()) * len(own) ** 0.5
        if left > max(MOST_LEFT * difference, MULTIPLE * limit):
            return False
    return True


def why_unpredictable(request: Request) -> str:
    """Why nothing can be predicted of what the ranks of a request hold; "" if it can."""
    if request.training.is_of_the_user:
        return "the reference is your own, and nothing can be predicted from it"
    if request.compare == "gradients":
        return ""
    if not request.training.is_plain_sgd:
        return "what another optimizer than plain SGD does to the weights is not predicted"
    if request.step_count > 1:
        return "after its first step a wrong run has weights that no prediction is made for"
    return ""


LOSS_ROUNDING = 1e-4
"""Losses that differ by less, relative to the larger one, are equal up to rounding in float32. In a
lower precision losses indicate nothing."""


def indication_if(
    holds: bool | None, because: str, otherwise: str, conclusive: bool = False
) -> Indication | None:
    """An indication for the cause if ``holds``, else one against it; None if ``holds`` is None."""
    if holds is None:
        return None
    return Indication(holds, because if holds else otherwise, conclusive and holds)


def ranks_by_number(ranks: Sequence[int]) -> str:
    """The ranks as text: ``rank 3``, ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def divided_by_ranks(view: View) -> str:
    """The end of a mend that reduces gradients; "" if their sum is the big batch's gradient."""
    differing, held = sorted(view.measured.differing), view.measured.by_rank
    places = view.parameters.positions_of(differing) if differing else slice(0)
    total = held[:, places].sum(0)
    if differing and len(held) == view.world_size and nearly_equal(total, view.expected[places]):
        return ""  # the step has divided what each rank holds already
    return "" if view.parts.add_up_to_the_big_batch else f", and divide by {view.world_size}"


def micro_batches_of_a_rank(view: View) -> int:
    """The largest number of micro-batches of a rank, whether its rows were recognised or not."""
    known = max((len(of_rank) for of_rank in view.parts.by_rank or ()), default=1)
    return max(known, unrecognised_micro_batches(view))


def unrecognised_micro_batches(view: View) -> int:
    """How often each rank called backward, where it was not recognised what it read; else 1."""
    if view.observed.examples_read is not None:
        return 1
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    return counts.pop() if len(counts) == 1 else 1


def losses_close(loss: float, other_loss: float) -> bool:
    """True if two losses are equal up to rounding."""
    return abs(loss - other_loss) <= LOSS_ROUNDING * max(abs(loss), abs(other_loss))


def losses_of_backwards(view: View) -> list[tuple[float, float]] | None:
    """For every backward of every rank: the loss at which it began, and that of its own examples.

    A backward without one of these losses is left out. None if no backward has both.
    """
    pairs = [
        (begun, own)
        for of_rank in view.losses_of_backwards or ()
        for begun, own in of_rank
        if begun is not None and begun == begun and own == own
    ]
    return pairs or None


def common_loss_factor(view: View) -> float | None:
    """The loss at which backward began, divided by the loss of the examples that were read.

    None if this ratio is not the same for every backward.
    """
    factors = [value / own for value, own in losses_of_backwards(view) or () if own]
    if not factors or not all(losses_close(factor, factors[0]) for factor in factors):
        return None
    return sum(factors) / len(factors)


def _every_rank_begins_at(view: View, loss: float) -> bool:
    """True if every backward of every rank began at this loss, and there are several ranks."""
    begun_at = [
        call.loss for rank in view.observed.by_rank for call in view.observed.backwards(rank)
    ]
    if view.world_size == 1 or not view.observed.covers_every_rank:
        return False
    return bool(begun_at) and all(
        value is not None and losses_close(value, loss) for value in begun_at
    )


def every_loss_is_the_big_batch_loss(view: View) -> bool:
    """True if every backward began at the loss of the whole batch, not of the examples it read."""
    pairs = losses_of_backwards(view)
    if pairs is None:
        return _every_rank_begins_at(view, view.examples.big_batch_loss)
    big_batch_loss = view.examples.big_batch_loss
    return all(losses_close(value, big_batch_loss) for value, _ in pairs) and not all(
        losses_close(own, big_batch_loss) for _, own in pairs
    )


def mean_loss_is_the_big_batch_loss(view: View) -> bool:
    """True if the ranks' losses are not those of their own examples alone, and their mean is the
    loss of the whole batch.

    Every rank goes backward once. A rank whose examples were not recognised has its share of them.
    """
    if view.world_size == 1 or not view.observed.covers_every_rank:
        return False
    backwards = [view.observed.backwards(rank) for rank in range(view.world_size)]
    begun_at = [calls[0].loss for calls in backwards if len(calls) == 1]
    losses = [loss for loss in begun_at if loss is not None and loss == loss]
    if len(losses) != view.world_size:
        return False
    if not losses_close(sum(losses) / len(losses), view.examples.big_batch_loss):
        return False
    own = [view.examples.loss(examples) for examples in view.parts.examples_by_rank]
    return not any(map(losses_close, losses, own))
