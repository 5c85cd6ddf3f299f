"""Finds which rows of one matrix are the rows of another, exactly or after an affine change.

A row is matched only by evidence: every row must fit, and all positions that it fits are returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.measurement.observation import Indices

Candidates = tuple[Indices, ...]
"""For every row, all positions in the big batch that it may come from."""

ROUNDING = 64.0
"""Values are equal after an affine change if they differ by at most this many eps."""

MOST_PAIRED = 64
"""An affine change of each feature is looked for in batches of at most this many examples."""

FEATURES_TRIED = 8
"""Anchors are looked for in this many features, and then checked in all."""

BITS_OF_A_FRACTION = 24.0
"""The information in a number that is not whole. A whole number has that of its range."""

BITS_NEEDED = 20.0
"""Rows of other numbers fit by chance once in 2 to this power."""


def bits_of_a_value(values: Tensor) -> float:
    """The information in a value of this tensor."""
    if not values.numel():
        return 0.0
    if values.is_floating_point() and bool((values != values.round()).any()):
        return BITS_OF_A_FRACTION
    spread = float(values.max()) - float(values.min())
    return min(BITS_OF_A_FRACTION, math.log2(1 + spread))


def equal_rows(batch: Tensor, rows: Tensor, bits: float, ways: int) -> Candidates | None:
    """The positions whose row is equal, bit for bit, once it has the dtype of ``rows``.

    ``batch``: shape (examples, features); ``rows``: shape (rows, features). None unless every row
    has a position, and unless other numbers would hardly fit by chance. ``bits``: the information
    in a value of the batch. ``ways``: the number of ways in which rows are looked for; 0 if these
    are rows as the batch has them, which need little evidence.
    """
    by_row = rows.shape[1] * bits - math.log2(len(batch) * max(1, ways))
    if by_row * len(rows) < (BITS_NEEDED if ways else 0.0) or by_row <= 0:
        return None
    begin = batch[:, :FEATURES_TRIED].to(rows.dtype)
    first = rows[0, :FEATURES_TRIED]
    if not bool(((begin == first) | (begin != begin)).all(1).any()):
        return None
    batch = batch.to(rows.dtype)
    positions: dict[bytes, list[int]] = {}
    for index, row in enumerate(bytes_of_rows(batch)):
        positions.setdefault(row, []).append(index)
    alike = {row: tuple(places) for row, places in positions.items()}
    candidates = [alike.get(row) for row in bytes_of_rows(rows)]
    return _if_all(candidates)


def affine_rows(batch: Tensor, rows: Tensor, bits: float) -> Candidates | None:
    """The positions whose row x gives the row as a * x + b, with the same a and b for all rows.

    a and b are numbers, or have a value for each feature. None unless every row has a position, and
    unless a and b follow from the rows without doubt. ``bits``: as for ``equal_rows``.
    """
    if not rows.is_floating_point() or _is_even_grid(rows) or _is_even_grid(batch):
        return None
    eps = torch.finfo(rows.dtype).eps
    if batch.is_floating_point():
        eps = max(eps, torch.finfo(batch.dtype).eps)
    bits = min(bits, -math.log2(ROUNDING * eps))
    x, y = batch.double(), rows.double()
    if not bool(x.isfinite().all() & y.isfinite().all()):
        return None
    count, features = rows.shape
    chance = count * math.log2(len(batch)) + BITS_NEEDED
    found = None
    if bits * (count * features - 2) >= chance:
        found = _scaled_rows(x, y, eps)
    if found is None and len(x) <= MOST_PAIRED and bits * (count - 2) * features >= chance:
        found = _scaled_features(x, y, eps)
    return found


def _scaled_rows(x: Tensor, y: Tensor, eps: float) -> Candidates | None:
    """One a and one b for all rows and features: the shape of each row is then the same."""
    shape_of_x, shape_of_y = _shapes(x), _shapes(y)
    alike = shape_of_y @ shape_of_x.T
    best = alike.abs().argmax(1)
    chosen = x[best]
    centred = chosen - chosen.mean()
    square = float((centred * centred).sum())
    if not square:
        return None
    a = float((centred * y).sum()) / square
    b = float(y.mean()) - a * float(chosen.mean())
    return _fitting(x, y, torch.full_like(x[0], a), torch.full_like(x[0], b), eps)


def _scaled_features(x: Tensor, y: Tensor, eps: float) -> Candidates | None:
    """An a and a b for each feature. Two rows give them, if it is known where these come from.

    For each pair of positions (p, q) of these two rows, the third row would have to come from
    x_p + t (x_q - x_p), where t follows from the rows alone.
    """
    second = int((y - y[0]).abs().sum(1).argmax())
    third = int((y - y[0]).abs().minimum((y - y[second]).abs()).sum(1).argmax())
    steps = y[second] - y[0]
    tried = steps.abs().topk(min(FEATURES_TRIED, x.shape[1])).indices
    if not bool(steps[tried].abs().min() > 0):
        tried = tried[steps[tried].abs() > 0]
    if not len(tried):
        return None
    t = ((y[third] - y[0]) / steps)[tried]
    few = x[:, tried]
    scale = few.abs().max() * (1 + t.abs())
    found: dict[Candidates, None] = {}
    for first in range(len(x)):
        wanted = few[first] + t * (few - few[first])
        distance = (wanted[:, None] - few[None]).abs() - 8 * ROUNDING * eps * scale
        for other in torch.nonzero((distance <= 0).all(2).any(1)).flatten().tolist():
            candidates = _with_anchors(x, y, (0, second), (first, other), eps)
            if candidates is not None:
                found[candidates] = None
            if len(found) > 1:
                return None
    return next(iter(found), None)


def _with_anchors(
    x: Tensor, y: Tensor, rows: Indices, places: Indices, eps: float
) -> Candidates | None:
    """The candidates, if these two ``rows`` come from these two ``places``."""
    run, rise = x[places[1]] - x[places[0]], y[rows[1]] - y[rows[0]]
    varies = run != 0
    if not bool(varies.any()) or bool((rise[~varies] != 0).any()):
        return None
    # Where the two places are equal, they say nothing of the feature's factor.
    a = rise[varies] / run[varies]
    b = y[rows[0]][varies] - a * x[places[0]][varies]
    return _fitting(x[:, varies], y[:, varies], a, b, eps)


def _fitting(x: Tensor, y: Tensor, a: Tensor, b: Tensor, eps: float) -> Candidates | None:
    """For each row of ``y``, the positions p with a x_p + b = y up to rounding."""
    if not bool(a.any()):
        return None
    predicted = a * x + b
    scale = torch.maximum((a * x).abs().amax(0), torch.maximum(b.abs(), y.abs().amax(0)))
    allowed = ROUNDING * eps * scale
    few = predicted[:, :FEATURES_TRIED]
    candidates = []
    for row in y:
        near = (few - row[:FEATURES_TRIED]).abs() <= allowed[:FEATURES_TRIED]
        places = torch.nonzero(near.all(1)).flatten()
        places = places[((predicted[places] - row).abs() <= allowed).all(1)]
        if not len(places):
            return None
        candidates.append(tuple(places.tolist()))
    return tuple(candidates)


def _shapes(rows: Tensor) -> Tensor:
    """Each row less its mean, with norm 1; zeros for a constant row."""
    centred = rows - rows.mean(1, keepdim=True)
    norms = centred.norm(dim=1, keepdim=True)
    return centred / torch.where(norms == 0, 1.0, norms)


def _is_even_grid(rows: Tensor) -> bool:
    """True if the rows are evenly spaced: any other such grid is an affine change of them."""
    if len(rows) < 3:
        return False
    values = rows.double()
    bends = values[2:] - 2 * values[1:-1] + values[:-2]
    return bool(bends.abs().max() <= 1e-5 * values.abs().max())


def _if_all(candidates: Sequence[Indices | None]) -> Candidates | None:
    known = tuple(places for places in candidates if places)
    return known if len(known) == len(candidates) else None


def bytes_of_rows(rows: Tensor) -> list[bytes]:
    """The bytes of every row. ``rows``: shape (rows, features), on the CPU."""
    if not rows.shape[1]:
        return [b""] * len(rows)
    return [row.tobytes() for row in rows.contiguous().view(torch.uint8).numpy()]
