"""Reads what a step returned: None, or tensors by name. Anything else gets an error."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.errors import whole_number
from ddp_equivalence.measurement.observation import Indices, RowsRead
from ddp_equivalence.ranks import rank
from ddp_equivalence.ranks.gpu_room import gpus_of
from ddp_equivalence.ranks.process_state import TF32_OVERRIDE, torchs_precision
from ddp_equivalence.ranks.rank import Rank

RIGHT = (
    "A step returns None and leaves its gradients on the model that it is given, or it returns a "
    "dict of parameter name -> gradient (of parameter name -> weight, if the update is compared). "
    "It returns no loss and no metrics"
)


MOST_ITEMS = 3


def tensors_by_name(returned: object) -> dict[str, Tensor | None]:
    """The dict that a step returned. Raises TypeError unless all its values are tensors or None."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"the step returned {_described(returned)}. {RIGHT}")
    for name, value in returned.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, Tensor)):
            what = f"a dict with {name!r}: {_described(value)}"
            raise TypeError(f"the step returned {what}. {RIGHT}")
    return dict(returned)


def no_parameters(returned: Iterable[str], parameters: Iterable[str]) -> TypeError:
    """The error for a dict of tensors in which no name is that of a parameter of the model."""
    names, model = _listed(returned), _listed(parameters)
    which = (
        f"the names {names}, none of which is a parameter"
        if "," in names
        else f"the name {names}, which is no parameter"
    )
    return TypeError(f"the step returned a dict with {which} of the model ({model}). {RIGHT}")


def _described(value: object) -> str:
    if isinstance(value, nn.Module):
        return (
            f"a module, {type(value).__name__} (for its gradients, return {{name: parameter.grad "
            "for name, parameter in module.named_parameters()}; for its weights, its state_dict())"
        )
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {_listed(map(repr, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} ({_listed(map(_described, value))})"
    if type(value).__module__ == "numpy":
        return f"a numpy {type(value).__name__}, which torch.from_numpy makes a tensor"
    shown = f", {value!r:.40}" if isinstance(value, bool | int | float | str) else ""
    return f"a {type(value).__name__}{shown}"


def _listed(texts: Iterable[str]) -> str:
    first = list(islice(texts, MOST_ITEMS + 1))
    return ", ".join(first[:MOST_ITEMS]) + (", ..." if len(first) > MOST_ITEMS else "")


# The rows that a step says it reads, by ``rank.read(indices)``.


class DeclaredRows:
    """``positions``: for everything that the rank is given, one after the other, the places of its
    examples in the big batch.
    """

    def __init__(self, positions: Sequence[Indices]) -> None:
        self._positions = positions
        self._given: Indices = ()
        self._now: RowsRead | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside the block."""
        rank.heard_by.append(self._read)
        try:
            yield
        finally:
            rank.heard_by.remove(self._read)

    def begin(self, number: int) -> None:
        """The rank is given the examples with this number, of which nothing has been said."""
        self._given, self._now = self._positions[number], None

    def or_recognised(self, rows: RowsRead | None) -> RowsRead | None:
        """The rows of a call of the model; ``rows``: those that were recognised in its arguments.

        These count if each of them can be one example only.
        """
        if self._now is None or (rows is not None and rows.is_certain):
            return rows
        return self._now

    def _read(self, indices: Any) -> None:
        count = len(self._given)
        listed = indices.tolist() if hasattr(indices, "tolist") else indices
        numbers = [whole_number(one) for one in listed] if isinstance(listed, Iterable) else [None]
        known = [one for one in numbers if one is not None]
        if len(known) < len(numbers):
            raise TypeError(
                f"rank.read was given {reprlib.repr(indices)}; it takes the positions of examples, "
                "whole numbers in one dimension (those of a mask are mask.nonzero()[:, 0])"
            )
        wrong = next((one for one in known if not 0 <= one < count), None)
        if wrong is not None:
            raise ValueError(
                f"rank.read was given {wrong}; it takes positions, counted from 0, in the batch of "
                f"this step, which has {count} examples"
            )
        self._now = RowsRead(tuple((self._given[one],) for one in known), declared=True)


# What a rank on CUDA says of its run beside gradients: its GPUs, and the precision of float32.


@dataclass(frozen=True)
class Tf32:
    """Whether TF32, which keeps 10 bits of float32's mantissa, was allowed in float32 on a rank."""

    products: bool
    convolutions: bool


def gpus_used(
    rank: Rank, tensors: Iterable[Tensor | None], notes: Mapping[str, Any] | None = None
) -> str:
    """The physical GPUs that hold these tensors, and those that a strategy noted; "" on the CPU.

    ``tensors``: the weights and gradients that the step left. A step that moves them to another GPU
    than its rank's is seen by this. One that only computes there is not.
    """
    if rank.device.type != "cuda":
        return ""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    devices |= {torch.device(name) for name in (notes or {}).get("devices", ())}
    return gpus_of(devices) or gpus_of([rank.device])


def tf32_of(rank: Rank) -> Tf32 | None:
    """Whether TF32 is allowed now; None on the CPU, which has no TF32 of this kind."""
    if rank.device.type != "cuda":
        return None
    if os.environ.get(TF32_OVERRIDE) == "0" and torch.version.hip is None:
        return Tf32(products=False, convolutions=False)
    products, convolutions = torchs_precision()
    return Tf32(products=products == "tf32", convolutions=convolutions == "tf32")
