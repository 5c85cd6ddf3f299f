"""Notices the lines of a step that change the weights, or whether these require a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from torch import nn

from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.measurement.plain_tensors import NotPlain, plain

MOST_ELEMENTS = 20_000_000
"""The weights of a larger model are not compared."""

DIGITS = 16
"""Digests are cut to so many digits."""

SHARDED = "sharded"
"""Takes the place of a digest for a weight of which a rank has only a part."""


class WeightWatch:
    """Compares the weights of a model, and what requires a gradient, with what they were.

    ``parameters``: those that get a gradient. ``others``: those that get none, such as a teacher's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self._parameters = parameters
        self._flags = self._flags_now()
        elements = sum(one.numel() for one in parameters.values())
        self._compares = elements <= MOST_ELEMENTS
        self._compared = {**parameters, **_comparable(others or {}, MOST_ELEMENTS - elements)}
        self._versions = self._versions_now()
        self._digests = self._digests_now() if self._compares else {}
        self._first = self._digests

    def switched(self) -> dict[bool, tuple[str, ...]]:
        """Whether a gradient is required now -> the parameters for which this is new."""
        now = self._flags_now()
        if now == self._flags:
            return {}
        before, self._flags = self._flags, now
        changed = [
            (name, flag)
            for name, flag, old in zip(self._parameters, now, before, strict=True)
            if flag != old
        ]
        return {
            flag: tuple(name for name, its in changed if its is flag)
            for flag in dict.fromkeys(flag for _, flag in changed)
        }

    def changed(self, by_value: bool) -> tuple[tuple[str, ...], str]:
        """The parameters that have changed since the last call, and a digest of all weights; "" if
        they are again what they were at first.

        ``by_value``: compare all values, and not only those whose version has changed.
        """
        if not self._compares:
            return (), ""
        versions = self._versions_now()
        if versions == self._versions and not by_value:
            return (), ""
        before = self._digests
        self._versions, self._digests = versions, self._digests_now()
        names = tuple(
            name
            for name, one in self._digests.items()
            if one != before[name] and SHARDED not in (one, before[name])
        )
        return names, "" if self._digests == self._first else digest_of(self._digests)

    def _flags_now(self) -> list[bool]:
        return [one.requires_grad for one in self._parameters.values()]

    def _versions_now(self) -> list[int]:
        return [one._version for one in self._compared.values()]

    def _digests_now(self) -> dict[str, str]:
        return {name: _digest(name, one) for name, one in self._compared.items()}


def _digest(name: str, weight: nn.Parameter) -> str:
    try:
        return digest({name: plain(weight)})
    except NotPlain:
        return SHARDED


def _comparable(others: Mapping[str, nn.Parameter], most: int) -> Mapping[str, nn.Parameter]:
    """The parameters without a gradient; {} if there are too many, or some hold no values."""
    try:
        if sum(one.numel() for one in others.values()) > most:
            return {}
        for name, one in others.items():
            digest({name: plain(one)})
    except Exception:  # it is on no device, or has no shape yet
        return {}
    return others


def digest_of(digests: Mapping[str, str]) -> str:
    """One digest of several."""
    return sha256("".join(digests.values()).encode()).hexdigest()[:DIGITS]
