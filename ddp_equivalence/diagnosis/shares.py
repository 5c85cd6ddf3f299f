"""How often did each example enter the measured gradient? Least squares over all parameters.

With g_i the gradient of example i alone, solve measured = sum_i s_i g_i, and the same for the big
batch; the ratio of the two solutions is the share, 1.00 where an example counts as in the big
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ddp_equivalence.diagnosis.view import WORST_CONDITION, View
from ddp_equivalence.strategies.sharded_batch import Indices

MAX_EXAMPLES = 1024
MAX_VALUES = 4_000_000
"""Examples, and examples x elements, beyond which one gradient a micro-batch is taken instead."""

Row = tuple[float | None, ...]


@dataclass(frozen=True)
class Fit:
    """``shares[rank][n]``: the share of piece n in what ``rank`` holds (None: no gradient of its
    own). ``unexplained``: what no mixture of the pieces explains, by rank. ``condition``: of the
    fit, over so many ``elements``.
    """

    shares: Mapping[int, Row]
    unexplained: Mapping[int, float]
    condition: float
    elements: int


@dataclass(frozen=True)
class Shares:
    """Shares of what every rank holds, 1.00 where something counts as in the big batch.

    ``pieces`` says what could be told apart: "examples", "micro-batches" or "ranks". ``by_rank``,
    ``by_node`` and ``by_micro_batch`` (of rank r, in turn) are means over the examples;
    ``by_example`` is None where examples could not be told apart, ``by_micro_batch`` where there
    are none. ``only``: the parameters that the fit was made on, where the others are right.
    ``why_not_examples``: the condition that failed.
    """

    by_rank: Mapping[int, Row]
    by_node: Mapping[int, Row]
    by_micro_batch: Mapping[int, tuple[Row, ...]] | None
    by_example: Mapping[int, Row] | None
    unexplained: Mapping[int, float]
    condition: float
    elements: int
    pieces: str
    only: tuple[str, ...] = ()
    why_not_examples: str = ""


def shares_of(view: View) -> Shares | str:
    """The shares of what every rank holds, or why there are none."""
    if view.parts is None:
        return "which examples each rank took is not known"
    micro = [part for of_rank in view.parts for part in of_rank]
    of_rank = [tuple(i for part in parts for i in part) for parts in view.parts]
    examples = sorted({i for indices in of_rank for i in indices})
    elements = sum(len(range(place.start, place.stop)) for place in _places(view))
    fit: Fit | str
    if len(examples) > MAX_EXAMPLES or len(examples) * elements > MAX_VALUES:
        fit = f"{len(examples)} examples are too many to fit one by one"
    else:
        fit = _fit(view, [(index,) for index in examples], "examples")
    if isinstance(fit, Fit):
        place = {index: n for n, index in enumerate(examples)}
        return _shares(view, fit, "examples", place, fit.shares)
    why = fit
    has_micro_batches = len(micro) > len(of_rank)
    for pieces, name in ((micro, "micro-batches"), (of_rank, "ranks")):
        if name == "micro-batches" and not has_micro_batches:
            continue
        fit = _fit(view, pieces, name)
        if isinstance(fit, Fit):
            place = {index: n for n, indices in enumerate(pieces) for index in indices}
            return _shares(view, fit, name, place, None, why)
    return fit


def _shares(
    view: View,
    fit: Fit,
    pieces: str,
    place: Mapping[int, int],
    by_example: Mapping[int, Row] | None,
    why: str = "",
) -> Shares:
    assert view.parts is not None
    nodes = [
        tuple(i for rank in view.layout.ranks_on(node) for part in view.parts[rank] for i in part)
        for node in range(view.layout.nodes)
    ]
    of_rank = [tuple(i for part in parts for i in part) for parts in view.parts]

    def means(groups: Sequence[Indices]) -> dict[int, Row]:
        return {
            rank: tuple(_mean([row[place[i]] for i in indices]) for indices in groups)
            for rank, row in fit.shares.items()
        }

    by_micro_batch = None
    if pieces != "ranks" and any(len(parts) > 1 for parts in view.parts):
        by_micro_batch = {
            rank: tuple(
                tuple(_mean([row[place[i]] for i in part]) for part in parts)
                for parts in view.parts
            )
            for rank, row in fit.shares.items()
        }
    return Shares(
        by_rank=means(of_rank),
        by_node=means(nodes),
        by_micro_batch=by_micro_batch,
        by_example=by_example,
        unexplained=fit.unexplained,
        condition=fit.condition,
        elements=fit.elements,
        pieces=pieces,
        only=tuple(name for name in view.shapes if name in view.differing)
        if view.only_some_differ
        else (),
        why_not_examples=why,
    )


def _places(view: View) -> list[slice]:
    """Where only some parameters differ, the others need no explanation."""
    if not view.only_some_differ:
        return list(view.places.values())
    return [place for name, place in view.places.items() if name in view.differing]


def _fit(view: View, pieces: list[Indices], name: str) -> Fit | str:
    """The fit, or why it cannot be made."""
    chosen = torch.cat([torch.arange(place.start, place.stop) for place in _places(view)])
    whole = [view.expected, *view.measured]
    gradients = [view.gradient(piece) for piece in pieces]
    if not all(bool(vector.isfinite().all()) for vector in whole):
        return "what a rank holds is not finite"
    vectors = torch.stack([vector[chosen] for vector in whole], dim=1)
    found = [one[chosen] for one in gradients]
    usable = [n for n, one in enumerate(found) if bool(one.isfinite().all()) and one.any()]
    if not usable:
        return f"none of the {name} has a gradient of its own"
    matrix = torch.stack([found[n] for n in usable], dim=1)
    if matrix.shape[0] < matrix.shape[1]:
        return f"{len(usable)} {name}, but only {matrix.shape[0]} elements to tell them apart by"
    values = torch.linalg.svdvals(matrix)
    condition = float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
    if condition > WORST_CONDITION:
        return f"the gradients of the {name} are too alike (condition number {condition:.1e})"
    solution = torch.linalg.lstsq(matrix, vectors).solution
    rest = vectors - matrix @ solution
    expected = solution[:, 0]
    left = float(rest[:, 0].norm()) / max(float(vectors[:, 0].norm()), 1e-300)
    if left > 1e-6:
        what = {"ranks": "the ranks' shards"}.get(name, name)
        return f"the loss is no sum over {what}: they leave {left:.2g} of the big batch unexplained"
    if bool((expected.abs() < 1e-9 * expected.abs().max()).any()):
        return f"some {name} do not count in the big batch"
    shares: dict[int, Row] = {}
    unexplained: dict[int, float] = {}
    for column, rank in enumerate(view.ranks, start=1):
        row: list[float | None] = [None] * len(pieces)
        for n, share in zip(usable, (solution[:, column] / expected).tolist(), strict=True):
            row[n] = share
        shares[rank] = tuple(row)
        size = max(float(vectors[:, column].norm()), 1e-300)
        unexplained[rank] = float(rest[:, column].norm()) / size
    return Fit(shares, unexplained, condition, len(chosen))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
