"""What is known of a difference beside its cause: in which half it lies, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.diagnosis.diagnose import Finding, diagnose
from ddp_equivalence.diagnosis.view import View, unexplained

AGREE = 1e-6
"""Vectors of float64 that agree to this are one; of other types, to ``ROUNDING`` eps."""

ROUNDING = 100.0

PARALLEL = 0.98
"""The cosine from which on a rest is called a multiple of the weights."""


@dataclass(frozen=True)
class Clues:
    """``half``: "together" if the ranks' own gradients are right and what is made of them is not,
    "before" if they are put together as they should be and are themselves not right, "" if that
    cannot be said. ``by_module``: module -> what fits there alone, where nothing fits on all.
    ``weights``: parameter -> how many times its own weights are left over. ``loss``: of the big
    batch; ``mean_loss``: of the ranks' losses.
    """

    half: str = ""
    by_module: Mapping[str, Finding] | None = None
    weights: Mapping[str, float] | None = None
    loss: float | None = None
    mean_loss: float | None = None


def clues(view: View, comparison: Comparison, named: bool) -> Clues:
    """Everything that can be said of a difference in one step; the costly only if not ``named``."""
    loss, mean_loss = _losses(view)
    return Clues(
        half=_half(view),
        by_module=None if named else dict(_by_module(view, comparison)),
        weights=None if named or view.before else _of_weights(view),
        loss=loss,
        mean_loss=mean_loss,
    )


def left_over_of_weights(
    case: Case,
    selection: ElementSample[str],
    expected: Tensor,
    measured: Tensor,
) -> Mapping[str, float]:
    """Parameter -> c, where measured - expected is c times the weights it had at the start."""
    start = {name: one.detach() for name, one in build_model(case).named_parameters()}
    found, begin = {}, 0
    for name in selection.sizes:
        place = slice(begin, begin + selection.size(name))
        begin = place.stop
        weight = selection.only([name]).of({name: start[name]})
        rest = measured[place] - expected[place]
        sizes = float(weight.norm() * rest.norm())
        if len(weight) < 3 or not sizes or float(rest.norm()) < AGREE * float(expected.norm()):
            continue
        if abs(float(weight @ rest)) >= PARALLEL * sizes:
            found[name] = float(weight @ rest) / float(weight @ weight)
    return found


def _half(view: View) -> str:
    if view.seen is None or view.world_size == 1:
        return ""
    agree = max(AGREE, ROUNDING * torch.finfo(view.dtype).eps)
    own = view.owns[0] if view.owns else None
    if own is None:
        return ""
    ways = (own.mean(0), own.sum(0))
    put_right = any(unexplained(view.measured, view.everywhere(way)) < agree for way in ways)
    own_right = any(unexplained(way, view.expected) < agree for way in ways)
    if put_right and not own_right:
        return "before"
    return "together" if own_right and not put_right else ""


def _losses(view: View) -> tuple[float | None, float | None]:
    now = len(view.before)
    by_rank = []
    for seen in view.observed.values():
        values = [one.loss for one in seen.backwards if one.step == now]
        if not values or any(value is None for value in values):
            return None, None
        by_rank.append(sum(value for value in values if value is not None))
    if not by_rank:
        return None, None
    return view.piece(tuple(range(view.examples))).loss, sum(by_rank) / len(by_rank)


def _by_module(view: View, comparison: Comparison) -> Iterator[tuple[str, Finding]]:
    """Terms of a loss that reach some modules alone may be wrong in a way that has a name."""
    modules: dict[str, list[str]] = {}
    for name in view.shapes:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    if len(modules) == 1:
        return
    for module, names in modules.items():
        if not view.differing.issuperset(names):
            continue
        first, *_ = *diagnose(_only(view, names), comparison), None
        if first is not None and first.accepted and not first.second:
            yield module, first


def _only(view: View, names: list[str]) -> View:
    places = torch.cat([torch.arange(view.places[n].start, view.places[n].stop) for n in names])
    return replace(
        view,
        expected=view.expected[places],
        measured=view.measured[:, places],
        shapes={name: view.shapes[name] for name in names},
        selection=view.selection.only(names),
        previous=tuple(one[places] for one in view.previous),
        differing=view.differing.intersection(names),
        known={},
    )


def _of_weights(view: View) -> Mapping[str, float]:
    return left_over_of_weights(view.case, view.selection, view.expected, view.measured[0])
