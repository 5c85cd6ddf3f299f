"""The result of a comparison, as frozen data: errors and limits by parameter and rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.comparison.structure import OtherForm
from ddp_equivalence.comparison.tolerance import Limit

DIGITS = 32
"""So many hexadecimal digits of a digest are kept."""

CERTAIN = 1000.0
"""A parameter that is so many times beyond its limit is wrong, however well it is rounded."""


@dataclass(frozen=True)
class RankError:
    """How far one parameter's gradient m on one rank is from the true gradient t.

    ``distance``: ||m - t||. ``error``: ||m - t|| / ||t||. ``element``: the worst
    |m_i - t_i| / max(|t_i|, rms of t), and ``place`` is the index i of that element. ``alone``:
    True if no other element is off. ``bits``: a hash of its bytes; empty if all are zeros.
    ``factor``: the number k for which k t is nearest to m. ``unexplained``: ||m - k t|| / ||m||.
    ``ratio``: ||m|| / ||t||. ``within``: True if error and element are within the limit.
    """

    rank: int
    distance: float
    error: float
    element: float
    factor: float
    unexplained: float
    ratio: float
    within: bool
    place: tuple[int, ...] = ()
    alone: bool = False
    bits: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True)
class ParameterComparison:
    """One parameter in one step on all ranks, with the limit that it is held to.

    ``name`` is the parameter's name, followed by the step if several steps are compared.
    ``norm`` is the norm of the true gradient.
    """

    name: str
    key: GradientKey
    shape: tuple[int, ...]
    norm: float
    limit: Limit
    by_rank: tuple[RankError, ...]
    ranks_agree: bool

    @property
    def same(self) -> bool:
        return all(rank.within for rank in self.by_rank)

    @property
    def worst(self) -> RankError:
        return max(self.by_rank, key=lambda rank: (not rank.within, in_order(rank.error)))

    @property
    def error(self) -> float:
        return self.worst.error


@dataclass(frozen=True)
class Comparison:
    """The result for all parameters.

    ``structure`` lists, as sentences, the names, shapes, dtypes and missing gradients that differ.
    ``elements`` counts the elements of all compared parameters. ``other_forms`` lists gradients
    whose form alone differs, which is no difference. ``same`` is True only if the ranks also agree
    to the last bit: ranks that train together must leave a step with the same weights, or they
    drift apart.
    """

    parameters: tuple[ParameterComparison, ...]
    structure: tuple[str, ...]
    ranks: tuple[int, ...]
    elements: int
    other_forms: tuple[OtherForm, ...] = ()

    @property
    def fewest_exchanged(self) -> int:
        """A collective on fewer elements than this carries no gradient to another rank.

        A collective on one element does so only if no parameter has more: DDP's constructor
        gathers one, and a loss or a count may be reduced.
        """
        return min(2, max((math.prod(one.shape) for one in self.parameters), default=2))

    @property
    def digests(self) -> Mapping[int, str]:
        """Of what each rank holds: names, shapes and bytes of all parameters that are compared.

        It does not depend on the order of the parameters. Gradients of other bytes have another
        digest, but for a chance of 2^-32 for a tensor of 64 KiB or more. Zeros have one whatever
        their sign.
        """
        hashes = {rank: hashlib.sha256() for rank in self.ranks}
        for one in sorted(self.parameters, key=lambda parameter: parameter.key):
            for of_rank in one.by_rank:
                described = repr((one.key, one.shape)).encode()
                hashes[of_rank.rank].update(described + of_rank.bits)
        return {rank: hashed.hexdigest()[:DIGITS] for rank, hashed in hashes.items()}

    @property
    def ranks_agree(self) -> bool:
        """True if every gradient is bit for bit the same on all ranks."""
        return all(parameter.ranks_agree for parameter in self.parameters)

    @property
    def only_bits_differ(self) -> bool:
        """True if every rank is right within the limits, but not all ranks hold the same bits."""
        within = all(parameter.same for parameter in self.parameters)
        return within and not self.structure and not self.ranks_agree

    @property
    def same(self) -> bool:
        return (
            self.ranks_agree
            and not self.structure
            and all(parameter.same for parameter in self.parameters)
        )

    @property
    def may_be_rounding(self) -> bool:
        """True if something differs, but by so little that rounding may be the reason."""
        return (
            not self.same
            and self.ranks_agree
            and not self.structure
            and all(
                rank.distance <= one.limit.perhaps_rounding
                for one in self.parameters
                for rank in one.by_rank
            )
        )

    @property
    def has_useless_limits(self) -> bool:
        """True if a parameter's limit lies above its gradient, which is more than rounding."""
        return any(one.norm > 0 and one.limit.is_useless for one in self.parameters)

    @property
    def differing(self) -> tuple[ParameterComparison, ...]:
        """The parameters beyond their limit, worst first.

        Parameters that are beyond it equally far, up to rounding, stay in the order of the model.
        """
        beyond = [parameter for parameter in self.parameters if not parameter.same]
        return tuple(sorted(beyond, key=_how_wrong, reverse=True))

    @property
    def worst(self) -> ParameterComparison | None:
        """The parameter nearest to its limit, or furthest beyond it.

        One whose true gradient is zero except for rounding, and which is within its limit, is only
        taken if there is no other: its error relative to that gradient says nothing.
        """
        telling = [one for one in self.parameters if not (one.limit.only_rounding and one.same)]
        return max(telling or self.parameters, key=_how_wrong, default=None)

    @property
    def only_rounding(self) -> tuple[ParameterComparison, ...]:
        """The parameters whose true gradient is zero except for rounding."""
        return tuple(one for one in self.parameters if one.limit.only_rounding)


def _how_wrong(parameter: ParameterComparison) -> tuple[float, float]:
    """How far beyond its limit the parameter is, and how large the error is.

    Among parameters that are certainly wrong only the error counts: a limit may follow from the
    rounding that was measured, which is another on every processor.
    """
    excess = in_order(_excess(parameter))
    return CERTAIN if excess > CERTAIN else excess, in_order(parameter.error)


def _excess(parameter: ParameterComparison) -> float:
    """The error of the worst rank, divided by the limit."""
    if parameter.limit.relative > 0 and math.isfinite(parameter.limit.relative):
        return parameter.error / parameter.limit.relative
    return math.inf if parameter.error > 0 else 0.0
