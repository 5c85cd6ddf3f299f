"""How often did each example enter the measured gradient? Least squares over all parameters.

With g_i the gradient of example i alone, solve measured = sum_i s_i g_i, and the same for the big
batch; the ratio of the two solutions is the share, 1.00 where an example counts as in the big
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import View, flatten
from ddp_equivalence.facts import Indices

MAX_EXAMPLES = 32
"""Beyond, one gradient a rank is taken instead of one an example."""

WORST_CONDITION = 1e8
"""Beyond this condition number the gradients of single examples cannot be told apart."""


@dataclass(frozen=True)
class Shares:
    """``by_example[rank][i]``: the share of example i in what ``rank`` holds (None: no gradient
    of its own, or only shares of whole ranks could be told apart). ``by_rank[rank][r]``: the mean
    share of the examples of rank r. ``unexplained``: what no mixture of examples explains, by
    rank. ``condition`` of the fit, whose ``pieces`` were "examples" or "ranks".
    """

    by_rank: Mapping[int, tuple[float | None, ...]]
    by_example: Mapping[int, tuple[float | None, ...]] | None
    unexplained: Mapping[int, float]
    condition: float
    pieces: str


def shares_of(view: View, measured: Mapping[int, Mapping[str, Tensor | None]]) -> Shares | None:
    """The shares of what every rank holds; None where the pieces cannot be told apart."""
    if view.parts is None:
        return None
    of_rank = [tuple(i for part in parts for i in part) for parts in view.parts]
    examples = sorted(i for indices in of_rank for i in indices)
    seen = {rank: flatten(dict(measured[rank]), view.shapes) for rank in view.ranks}
    if len(examples) <= MAX_EXAMPLES:
        fit = _fit(view, [(index,) for index in examples], seen)
        if fit is not None:
            shares, rest, condition = fit
            place = {index: n for n, index in enumerate(examples)}
            by_rank = {
                rank: tuple(_mean([row[place[i]] for i in indices]) for indices in of_rank)
                for rank, row in shares.items()
            }
            return Shares(by_rank, shares, rest, condition, "examples")
    fit = _fit(view, of_rank, seen)
    return None if fit is None else Shares(fit[0], None, fit[1], fit[2], "ranks")


def _fit(
    view: View, pieces: list[Indices], seen: Mapping[int, Tensor]
) -> tuple[dict[int, tuple[float | None, ...]], dict[int, float], float] | None:
    gradients = [view.gradient(piece) for piece in pieces]
    usable = [n for n, one in enumerate(gradients) if bool(one.isfinite().all()) and one.any()]
    vectors = [view.expected, *seen.values()]
    if not usable or not all(bool(vector.isfinite().all()) for vector in vectors):
        return None
    matrix = torch.stack([gradients[n] for n in usable], dim=1)
    if matrix.shape[0] < matrix.shape[1]:
        return None
    values = torch.linalg.svdvals(matrix)
    condition = float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
    if condition > WORST_CONDITION:
        return None
    solution = torch.linalg.lstsq(matrix, torch.stack(vectors, dim=1)).solution
    rest = torch.stack(vectors, dim=1) - matrix @ solution
    expected = solution[:, 0]
    if float(rest[:, 0].norm()) > 1e-6 * float(view.expected.norm()):
        return None  # the loss is no sum over these pieces
    if bool((expected.abs() < 1e-9 * expected.abs().max()).any()):
        return None
    found: dict[int, tuple[float | None, ...]] = {}
    left: dict[int, float] = {}
    for column, (rank, vector) in enumerate(seen.items(), start=1):
        row: list[float | None] = [None] * len(pieces)
        for n, share in zip(usable, (solution[:, column] / expected).tolist(), strict=True):
            row[n] = share
        found[rank] = tuple(row)
        left[rank] = float(rest[:, column].norm()) / max(float(vector.norm()), 1e-300)
    return found, left, condition


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
