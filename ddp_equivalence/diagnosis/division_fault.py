"""The ranks' gradients and their reduction are right: the big batch divides otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.diagnosis.divisor_candidates import all_divisors
from ddp_equivalence.diagnosis.gradient_path import line_of
from ddp_equivalence.diagnosis.own_gradient_fault import Compared, loss_factor_text
from ddp_equivalence.diagnosis.pieces import Pieces
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts import Whereabouts, distinct, ranked
from ddp_equivalence.diagnosis.residual import unexplained

SAME = 1e-3
MOST_COUNTS = 8


def right_weights(
    pieces: Pieces, compared: Sequence[Compared]
) -> tuple[str, tuple[float, ...], float] | None:
    """What the big batch divides by: the unit, how much of it each piece has, and how much there
    is. None if no count of the batch makes it a weighted mean of the pieces.
    """
    setting = pieces.view.setting
    counts: dict[str, list[float]] = {}
    for one in compared:
        rows = one.piece.rows or ()
        batch = take(setting.batch, rows, setting.case.batch_dims)
        divisors: Mapping[str, float] = all_divisors(batch, len(rows))
        for unit, count in divisors.items():
            counts.setdefault(unit, []).append(count)
    gradients = torch.stack([one.gradient_alone for one in compared])
    for unit, of_pieces in counts.items():
        total = sum(of_pieces)
        if len(of_pieces) != len(compared) or not total:
            continue
        weights = torch.tensor(of_pieces, dtype=torch.float64) / total
        if unexplained(pieces.view.expected, weights @ gradients) <= pieces.tolerance:
            return unit, tuple(of_pieces), total
    if unexplained(pieces.view.expected, gradients.sum(0)) <= pieces.tolerance:
        return "", (1.0,) * len(compared), 1.0
    return None


def fault_of_division(pieces: Pieces, compared: Sequence[Compared]) -> Whereabouts:
    """Each piece's gradient is ``factor`` times that of its rows, and they are averaged."""
    known = right_weights(pieces, compared)
    factors = torch.tensor([one.factor or 0.0 for one in compared], dtype=torch.float64)
    if known is not None:
        wanted = torch.tensor(known[1], dtype=torch.float64) / known[2]
        relative = factors / wanted.where(wanted > 0, torch.ones_like(wanted))
    else:
        relative = factors
    if not _alike(factors):
        odd = _odd(relative)
        if odd:
            return _wrong_loss(pieces, compared, odd)
    if known is None:
        return _no_mean(pieces, compared)
    return _other_divisor(pieces, compared, known)


def _alike(values: Tensor) -> bool:
    return float(values.max() - values.min()) <= SAME * float(values.abs().max())


def _odd(values: Tensor) -> list[int]:
    """The positions whose values are not those of the majority; [] if there is none."""
    near = (values[:, None] - values[None, :]).abs() <= SAME * values.abs().max()
    most = int(near.sum(1).argmax())
    if int(near[most].sum()) * 2 < len(values):
        return []
    return [number for number, is_near in enumerate(near[most].tolist()) if not is_near]


def _wrong_loss(
    pieces: Pieces, compared: Sequence[Compared], odd: Sequence[int]
) -> Whereabouts:
    """Some pieces have another factor than the others."""
    others = next(one for number, one in enumerate(compared) if number not in odd)
    first = compared[odd[0]]
    ranks = tuple(sorted({compared[number].piece.rank for number in odd}))
    who = ranked(ranks, pieces.view.world_size)
    where = "" if len(pieces.by_rank[ranks[0]]) == 1 else (
        f" in backward pass {first.piece.number + 1}"
    )
    assert first.factor is not None and others.factor is not None
    begun = ""
    if first.loss_factor is not None and abs(first.loss_factor - first.factor) <= SAME * abs(
        first.factor
    ):
        begun = f": backward began at {loss_factor_text(first.factor)}"
    sentence = (
        f"The own gradient of {who}{where} is {first.factor:.4g} times what its rows give{begun}; "
        f"on rank {others.piece.rank} it is {others.factor:.4g} times."
    )
    call = first.piece.call
    lines = [
        *lines_only_on(pieces.view, ranks),
        _pointed(call.made_at if call else None, f"the loss of {who}", True),
        _pointed(
            line_of(call) if call else None,
            f"on rank {first.piece.rank} {first.factor:.4g}, on rank {others.piece.rank} "
            f"{others.factor:.4g} times the gradient of the rows",
            True,
        ),
    ]
    return Whereabouts(
        "own gradient",
        f"{who}: the loss has another factor",
        sentence,
        distinct(lines),
        pieces.view.parameters.names,
        ranks,
    )


def _no_mean(pieces: Pieces, compared: Sequence[Compared]) -> Whereabouts:
    call = compared[0].piece.call
    pieces_text = "rank's rows" if len(compared) == pieces.view.world_size else "micro-batch"
    gradients = torch.stack([one.gradient_alone for one in compared])
    mixed = _is_mixture(pieces, gradients)
    why = (
        "It is a mixture of them with weights that no count of the batch gives"
        if mixed
        else "It is no mixture of them at all, so the loss or the model looks across rows"
    )
    return Whereabouts(
        "big batch",
        "the big batch is no mean of the parts",
        f"Each gradient is that of its {pieces_text}, and they are averaged rightly, but the "
        f"gradient of the big batch is not this mean. {why}.",
        distinct(_loss_lines(call, "the loss of the rank's own rows")),
        pieces.view.parameters.names,
        tuple(range(pieces.view.world_size)),
    )


def _is_mixture(pieces: Pieces, gradients: Tensor) -> bool:
    if gradients.shape[1] < gradients.shape[0] + 3:
        return False
    solved = torch.linalg.lstsq(gradients.T, pieces.view.expected, driver="gelsd").solution
    return unexplained(pieces.view.expected, solved @ gradients) <= pieces.tolerance


def _other_divisor(
    pieces: Pieces, compared: Sequence[Compared], known: tuple[str, tuple[float, ...], float]
) -> Whereabouts:
    unit, counts, total = known
    call = compared[0].piece.call
    what = "rank" if len(compared) == pieces.view.world_size else "micro-batch"
    if not unit:
        text = "the big batch is their sum"
        note = "the loss of the rows is a sum"
    else:
        shown = ", ".join(f"{count:g}" for count in counts[:MOST_COUNTS])
        more = ", ..." if len(counts) > MOST_COUNTS else ""
        text = (
            f"the losses divide by {shown}{more} ({unit}), and the big batch by {total:g}, "
            "so the parts should not count equally"
        )
        note = f"divides by the {what}'s own count ({unit})"
        if max(counts) == min(counts):
            text = f"the parts count equally in the big batch ({unit}), but not in the result"
            note = "the loss of the rows"
    return Whereabouts(
        "big batch",
        "the big batch divides by another number",
        f"Each {what}'s gradient is that of its rows, and they are averaged: {text}.",
        distinct(_loss_lines(call, note)),
        pieces.view.parameters.names,
        tuple(range(pieces.view.world_size)),
        fix="" if not unit else "divide each summed loss by the count of the whole batch.",
    )


def _loss_lines(call: object, note: str) -> list[PointedLine | None]:
    from ddp_equivalence.measurement.calls import Call

    if not isinstance(call, Call):
        return []
    return [_pointed(call.made_at, note, True), _pointed(line_of(call), "backward begins")]


def _pointed(line: object, note: str, is_fault: bool = False) -> PointedLine | None:
    from ddp_equivalence.measurement.calls import CodeLine

    return PointedLine(line, note, is_fault) if isinstance(line, CodeLine) else None
