"""A parameter requires no gradient on one rank, which then adds nothing to its average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    indication_if,
    ranks_by_number,
)
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

NAMES_SHOWN = 4


def predict(view: View) -> Sequence[Prediction]:
    """For the parameters that differ, the mean to which one rank adds nothing."""
    if view.world_size == 1 or not view.measured.differing:
        return ()
    # Where nothing was observed to be frozen, every rank is tried.
    ranks = sorted(_ranks_with_frozen_parameters(view)) or range(view.world_size)
    return tuple(
        prediction
        for local in view.local_gradients
        for rank in ranks
        for prediction in _predictions_without(view, rank, local)
    )


def _predictions_without(view: View, frozen_on: int, local: Tensor) -> Iterator[Prediction]:
    """``local``: every rank's local gradient, shape (world size, elements)."""
    differing = view.measured.differing
    names = ", ".join(sorted(differing)[:NAMES_SHOWN])
    detail = f"{ranks_by_number([frozen_on])}: {names}"
    others = [rank for rank in range(view.world_size) if rank != frozen_on]
    by_rank = view.on_every_rank(local[others].sum(0) / view.world_size)
    combined = view.parameters.combined
    yield Prediction(combined(by_rank, view.expected_by_rank, differing), detail)
    # The rank itself may hold no gradient of these parameters: None or zero.
    by_rank = by_rank.clone()
    if frozen_on in view.setting.reporting_ranks:
        row = view.setting.reporting_ranks.index(frozen_on)
        by_rank[row] = torch.zeros_like(view.expected)
        yield Prediction(combined(by_rank, view.expected_by_rank, differing), detail)


def _ranks_with_frozen_parameters(view: View) -> set[int]:
    """The ranks that freeze a differing parameter which is not frozen on all ranks."""
    frozen_by_rank = {rank: set(seen.frozen) for rank, seen in view.observed.by_rank.items()}
    frozen_on_some = set[str]().union(*frozen_by_rank.values())
    frozen_on_all = frozen_on_some.intersection(*frozen_by_rank.values())
    concerned = view.measured.differing - frozen_on_all
    return {rank for rank, frozen in frozen_by_rank.items() if concerned & frozen}


def indication(view: View) -> Indication | None:
    """Compares requires_grad of the differing parameters on all ranks."""
    if not view.observed.by_rank:
        return None
    ranks = sorted(_ranks_with_frozen_parameters(view))
    return indication_if(
        bool(ranks),
        f"requires_grad of a parameter that differs was False on {ranks_by_number(ranks)}",
        "requires_grad was the same on all ranks",
        conclusive=True,
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where the parameter was frozen."""
    frozen = set(_ranks_with_frozen_parameters(view))
    places = view.observed.calls.places(
        Kind.REQUIRES_GRAD,
        where=lambda call: "False" in call.what and bool(view.measured.differing & set(call.names)),
    )
    return [
        place.pointed(
            f"requires_grad = False for {names_text(place.names)} on "
            f"{ranks_by_number(place.ranks)}",
            is_fault=True,
        )
        for place in places
        if frozen >= set(place.ranks)
    ][:2]


def fix(view: View) -> str:
    """Set requires_grad alike."""
    return f"set requires_grad to the same value on all {view.world_size} ranks."


HYPOTHESIS = Hypothesis(
    name="parameter_frozen_on_one_rank",
    sentence="A parameter requires no gradient on one rank, so that this rank adds nothing to its "
    "average.",
    look_at="requires_grad set under a condition that is not the same on all ranks",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone cannot decide: compare requires_grad on all ranks.",
    headline="requires_grad differs between ranks",
    lines=lines,
    fix=fix,
)
