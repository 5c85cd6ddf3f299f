"""Every rank computes the loss of the whole batch, but only its own part carries a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Words,
    WrongFactor,
    every_loss_is_the_big_batch_loss,
    indication_if,
    losses_of_backwards,
    mean_loss_is_the_big_batch_loss,
)
from ddp_equivalence.diagnosis.lines.source_tree import is_in_class
from ddp_equivalence.diagnosis.lines.words import counted
from ddp_equivalence.diagnosis.means_of_parts import gradients_by_backward
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Contents, Kind
from ddp_equivalence.measurement.graph_watch import OwnBackward

OF_TORCH = "torch.distributed.nn.functional"
"""The collectives of torch that pass a gradient on."""


def factors(view: View) -> Sequence[WrongFactor]:
    """One over the world size, where the ranks may compute the loss of the whole batch."""
    if view.world_size == 1:
        return ()
    if not (view.setting.batch_coupled or every_loss_is_the_big_batch_loss(view)):
        return ()
    detail = f"each of the {view.world_size} ranks adds only its own part of the gradient"
    return (WrongFactor(1 / view.world_size, detail),)


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with the loss of the whole batch."""
    if _compares_own_rows(view):
        because = (
            "backward began at losses whose mean is that of the whole batch, and which are not "
            "those of the ranks' own examples alone"
        )
        return Indication(True, because, conclusive=True)
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
    gathered = [place for place in _gathers(view) if _is_gather(place)]
    if not gathered or any(map(_passes_on, _calls(view))):
        return False
    if every_loss_is_the_big_batch_loss(view) or not mean_loss_is_the_big_batch_loss(view):
        return False
    return _holds_the_mean(view)


def _calls(view: View) -> Iterator[Call]:
    return (call for rank in view.observed.by_rank for call in view.observed.calls.of(rank))


def _is_gather(place: CallSite) -> bool:
    """True for a gather. A sum brings no rank the rows of another."""
    return place.first.collective is not None and "gather" in place.first.collective.op


def _passes_on(call: Call) -> bool:
    """True for the backward pass of a gather of torch.distributed.nn.functional."""
    collective = call.collective
    return collective is not None and call.in_backward and collective.contents is Contents.OTHER


def _holds_the_mean(view: View) -> bool:
    """True if every rank holds the mean of what the ranks computed: nothing is wrong after that."""
    gradients = gradients_by_backward(view)
    if gradients is None or not view.measured.is_known:
        return False
    mean = torch.stack(gradients).sum(0).mean(0)
    return all(nearly_equal(held, mean) for held in view.measured.by_rank)


def words(view: View) -> Words | None:
    """Each rank may compute a part of the loss only."""
    if not _compares_own_rows(view):
        return None
    return Words(
        "Every rank computes the loss of its own examples against the outputs of all ranks, and "
        "what it gathered from the others carries no gradient: an output gets the gradient of its "
        "own rank's loss only.",
        "gathered outputs carry no gradient",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """The collective in the forward pass, and the loss that is computed from what it returns."""
    gathers = _gathers(view)
    if _compares_own_rows(view):
        gathers = [place for place in gathers if _is_gather(place)]
    losing = [place for place in gathers if any(_loses(call) for call in place.calls)]
    pointed = []
    for place in (losing or gathers)[-1:]:
        collective = place.first.collective
        if collective is not None:
            op = collective.op
            note = f"{op} of {counted(collective.elements, 'element')}"
            verb = "requires" if collective.elements == 1 else "require"
            note += f", which {verb} a gradient; what it returns has none" if losing else ""
            pointed.append(place.pointed(note, is_fault=True))
    backward = view.observed.calls.backwards[-1:]
    note = "begins at the loss of the whole batch on every rank"
    if _compares_own_rows(view):
        note = "begins at the loss of this rank's examples against all ranks' outputs"
    at_loss = [place.pointed(note, is_fault=not pointed) for place in backward]
    own = [] if losing else _own_backwards(view)
    if own:
        what = f"the gradient that {own[0].name} gives back; no collective ran in backward"
        returned = PointedLine(own[0].line, what, is_fault=True)
        return [returned, *(replace(one, is_fault=False) for one in (*pointed, *at_loss))]
    return [*pointed, *at_loss]


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


def _gathers(view: View) -> list[CallSite]:
    def is_in_forward(call: Call) -> bool:
        collective = call.collective
        return (
            collective is not None
            and not call.in_backward
            and call.backwards < len(view.observed.backwards(0))
            and ("gather" in collective.op or collective.op == "all_reduce")
            and collective.contents is Contents.OTHER
            and (collective.elements > 1 or collective.loses_gradient)
        )

    places = view.observed.calls.places(Kind.COLLECTIVE, where=is_in_forward)
    # One element beside more of them is a loss, which is summed for a log.
    return [place for place in places if _elements(place) > 1] or places


def _elements(place: CallSite) -> int:
    return 0 if place.first.collective is None else place.first.collective.elements


def _loses(call: Call) -> bool:
    return call.collective is not None and call.collective.loses_gradient


def fix(view: View) -> str:
    """Use a collective that passes the gradient on."""
    gathers = _gathers(view)
    ops = [place.first.collective.op for place in gathers if place.first.collective]
    if set(ops) == {"all_reduce"} and max(map(_elements, gathers)) == 1:  # a loss: DDP averages it
        return "call backward() on the rank's own loss, and reduce a detached copy for the log."
    op = "all_reduce" if ops and "reduce" in ops[-1] else "all_gather"
    losing = any(_loses(call) for place in gathers for call in place.calls)
    own = [] if losing else _own_backwards(view)
    if own:
        return f"all_reduce the gradient in {own[0].name}.backward, or use {OF_TORCH}.{op}."
    return f"use {OF_TORCH}.{op}, which passes the gradient on."


HYPOTHESIS = Hypothesis(
    name="gather_without_gradient",
    sentence="Every rank computes the loss of the whole batch, but only the rank's own examples "
    "carry a gradient. The average over the ranks then divides once too often by their number.",
    look_at="dist.all_gather or dist.all_reduce in the forward pass: they pass no gradient on; "
    "use the functions of torch.distributed.nn.functional, which do",
    factors=factors,
    indication=indication,
    tell_apart="Print the loss of each rank: here it is the loss of the whole batch.",
    headline="gathered outputs carry no gradient",
    lines=lines,
    fix=fix,
    words=words,
)
