"""Says of which ranks' own gradients a gradient is a mixture, and in which weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.measurement.trace import thinned

SAME_WEIGHT = 1e-3
"""Weights that differ by less than this, relative to the largest one, are equal."""

SPARE = 3
"""A mixture of n gradients is believed only of n elements and so many more."""


@dataclass(frozen=True)
class Mix:
    """``weights``: of the pieces of all ranks, shape (pieces,). ``of``: the parameters whose
    gradients these are, if other ones than those that hold them; () if the same.
    """

    weights: Tensor
    of: tuple[str, ...] = ()

    @property
    def uniform(self) -> float | None:
        """The weight that all pieces have; None if they differ."""
        most = float(self.weights.abs().max()) if len(self.weights) else 0.0
        spread = float(self.weights.max() - self.weights.min()) if len(self.weights) else 0.0
        return float(self.weights.mean()) if spread <= SAME_WEIGHT * most else None


@dataclass(frozen=True)
class Mixtures:
    """``own``: parameter -> what each piece computed, shape (pieces, elements that are kept).

    ``ranks`` and ``numbers``: of each piece. ``tolerance``: the largest relative difference of two
    equal vectors. ``groups``: sets of ranks in which something was reduced.
    """

    own: Mapping[str, Tensor]
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    tolerance: float
    groups: tuple[tuple[int, ...], ...] = ()

    def of(self, rank: int, values: Mapping[str, Tensor]) -> Mix | None:
        """The mixture that these gradients of a rank are; None if they are none, or if too few
        elements are known.
        """
        names = [name for name in values if name in self.own]
        if not names or any(len(values[one]) != self.own[one].shape[1] for one in names):
            return None
        held = torch.cat([values[name] for name in names])
        own = torch.cat([self.own[name] for name in names], dim=1)
        found = self._mix(rank, held, own)
        if found is not None:
            return Mix(found)
        return self._of_another(rank, names, values) if len(names) == 1 else None

    def _of_another(
        self, rank: int, names: Sequence[str], values: Mapping[str, Tensor]
    ) -> Mix | None:
        """The mixture of another parameter's gradients that this parameter holds."""
        held = values[names[0]]
        for name, own in self.own.items():
            if name != names[0] and own.shape[1] == len(held) > SPARE:
                found = self._mix(rank, held, own)
                if found is not None and bool(found.any()):
                    return Mix(found, (name,))
        return None

    def _mix(self, rank: int, held: Tensor, own: Tensor) -> Tensor | None:
        if not bool(held.isfinite().all()) or not bool(own.isfinite().all()):
            return None
        if not bool(held.any()):
            return torch.zeros(len(own), dtype=torch.float64)
        norm = float(held.norm())
        for chosen in self._likely(rank):
            mixed = chosen @ own
            square = float(mixed @ mixed)
            if square and len(held) > 1:
                factor = float(held @ mixed) / square
                if float((held - factor * mixed).norm()) <= self.tolerance * norm:
                    return factor * chosen
        if len(held) < len(own) + SPARE:
            return None
        scale = own.norm(dim=1)
        used = scale > 0
        if not bool(used.any()):
            return None
        matrix = (own[used] / scale[used, None]).T
        solved = torch.linalg.lstsq(matrix, held, rcond=1e-10, driver="gelsd")
        if int(solved.rank) < matrix.shape[1]:
            return None
        if float((held - matrix @ solved.solution).norm()) > self.tolerance * norm:
            return None
        weights = torch.zeros(len(own), dtype=torch.float64)
        weights[used] = solved.solution / scale[used]
        return weights

    def _likely(self, rank: int) -> Iterator[Tensor]:
        """Sets of pieces that gradients are often the sum of, the likeliest first."""
        ranks, numbers = torch.tensor(self.ranks), torch.tensor(self.numbers)
        sets = [torch.ones(len(ranks), dtype=torch.bool), ranks == rank]
        sets += [torch.isin(ranks, torch.tensor(group)) for group in self.groups]
        sets += [ranks == other for other in sorted(set(self.ranks) - {rank})]
        for one in sets:
            yield one.double()
        for last in sorted(set(self.numbers)):
            for one in sets[:2]:
                yield (one & (numbers <= last)).double()
                yield (one & (numbers == last)).double()


def mixtures_of(pieces: Pieces, each: int, groups: tuple[tuple[int, ...], ...]) -> Mixtures:
    """``each``: so many elements of each gradient are kept in the states of the watched run."""
    all_pieces = pieces.all
    scale = pieces.view.setting.scale
    own = {
        name: torch.stack([thinned(one.gradient[place] / scale, each) for one in all_pieces])
        for name, place in pieces.view.parameters.places.items()
        if all_pieces
    }
    return Mixtures(
        own=own,
        ranks=tuple(one.rank for one in all_pieces),
        numbers=tuple(one.number for one in all_pieces),
        tolerance=pieces.tolerance,
        groups=groups,
    )
