"""Lets one process draw, for the rows of several ranks, the random numbers that each rank drew.

A random operation whose result has a row for each row of the batch is cut along dim 0, and each
part is drawn by a generator in the state that its rank's was in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten

IN_PLACE = {
    *(aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to),
    *(aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default),
}
"""Operations that fill their first argument."""

MADE: dict[Any, Callable[..., Tensor]] = {
    aten.rand.default: torch.rand,
    aten.randn.default: torch.randn,
    aten.randint.default: torch.randint,
    aten.randint.low: torch.randint,
}
"""Operations that make a tensor of a given size."""


def _uniform_like(tensor: Tensor, **options: Any) -> Tensor:
    return torch.rand(tensor.shape, **{"dtype": tensor.dtype, **options})


def _normal_like(tensor: Tensor, **options: Any) -> Tensor:
    return torch.randn(tensor.shape, **{"dtype": tensor.dtype, **options})


LIKE: dict[Any, Callable[..., Tensor]] = {
    aten.rand_like.default: _uniform_like,
    aten.randn_like.default: _normal_like,
    aten.bernoulli.default: torch.bernoulli,
    aten.multinomial.default: torch.multinomial,
}
"""Operations that make a tensor with the rows of their first argument."""

DRAW_NOTHING = {aten.empty_like.default, aten.native_dropout_backward.default}


@dataclass(frozen=True)
class Source:
    """``state``: of a rank's generator; None if it is not known. ``count``: the rows of that rank.
    ``rows``: which of them are in this process's batch; None for all.
    """

    state: Tensor | None
    count: int
    rows: tuple[int, ...] | None

    @property
    def taken(self) -> int:
        """The number of its rows in this process's batch."""
        return self.count if self.rows is None else len(self.rows)


def _empty(tensor: Tensor, rows: int) -> Tensor:
    """A tensor of so many rows whose dimensions lie in memory as those of the other tensor do:
    random numbers are drawn in the order of the memory.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    shape = (rows, *tensor.shape[1:])
    empty = tensor.new_empty([shape[dim] for dim in order])
    return empty.permute([order.index(dim) for dim in range(tensor.ndim)])


def _drops(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """True if a dropout, or an attention, drops something."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(named)
    probability = given.get("dropout_p", given.get("p"))
    return float(probability or 0.0) > 0.0 and given.get("train") is not False


def _copied(result: Any) -> Any:
    return pytree.tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, result)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


class RankGenerators(TorchDispatchMode):
    """``missed``: how often each operation, which draws no rows, drew what not every rank drew.

    ``counts``: whether that is counted now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed: dict[str, int] = {}
        self.counts = True
        self._sources: list[tuple[Source, torch.Generator]] = []
        self._on = False
        self._in_blocks = False

    def use(self, sources: Sequence[Source], draws: bool, in_blocks: bool = False) -> None:
        """Draw from these from now on. ``draws``: the script draws random numbers at all.

        ``in_blocks``: where a result has several entries for each row of the batch, such as one
        for each of its crops, the first entries of all rows come first, and then the second ones.
        Otherwise those of one row stand together.
        """
        self._sources, self._in_blocks = [], in_blocks
        if not draws or any(source.state is None for source in sources):
            return
        if len(sources) == 1 and sources[0].rows is None:
            state = sources[0].state
            assert state is not None
            torch.set_rng_state(state)
            return
        for source in sources:
            generator = torch.Generator()
            assert source.state is not None
            generator.set_state(source.state)
            self._sources.append((source, generator))
        self.begin()

    def begin(self) -> None:
        """Be told of every operation from now on, until the process ends."""
        if not self._on:
            self._on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Draw as usual inside the block, in which a loader makes a batch that is not used."""
        sources, self._sources = self._sources, []
        try:
            yield
        finally:
            self._sources = sources

    def forget(self) -> None:
        """Draw as usual from now on."""
        self._sources = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if not self._sources or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **named)
        if func in DRAW_NOTHING or "out" in named or named.get("generator") is not None:
            return func(*args, **named)
        may_drop = "dropout" in str(func) or "scaled_dot_product" in str(func)
        if may_drop and not _drops(func, args, named):
            return func(*args, **named)
        drawn = self._drawn(func, args, named)
        return self._drawn_by_each(func, args, named) if drawn is None else drawn

    def _drawn_by_each(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What the first rank drew, where no rows are drawn: right if every rank drew the same.

        The generators of all ranks move on.
        """
        if func._schema.is_mutable and func not in IN_PLACE:
            self._note_missed(func)  # it is not known what it writes to
            return func(*args, **named)
        kept = torch.get_rng_state()
        results = []
        for _, generator in self._sources:
            torch.set_rng_state(generator.get_state())
            results.append(_copied(func(*args, **named)))
            generator.set_state(torch.get_rng_state())
        torch.set_rng_state(kept)
        if not all(_equal(results[0], one) for one in results):
            self._note_missed(func)
        if func._schema.is_mutable:
            args[0].copy_(results[0])
            return args[0]
        return results[0]

    def _note_missed(self, func: Any) -> None:
        if self.counts:
            self.missed[str(func)] = self.missed.get(str(func), 0) + 1

    def _drawn(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if func in IN_PLACE:
            each = self._each(args[0].shape)
            if not each:
                return None
            parts = [
                func(_empty(args[0], source.count * each), *args[1:], **draw)
                for source, draw in self._with_generators(named)
            ]
            args[0].copy_(self._joined(parts, each))
            return args[0]
        if func in MADE:
            *before, size = args
            each = self._each(size)
            if not each:
                return None
            options = {k: v for k, v in named.items() if k not in ("pin_memory",) and v is not None}
            parts = [
                MADE[func](*before, [source.count * each, *size[1:]], **draw)
                for source, draw in self._with_generators(options)
            ]
            return self._joined(parts, each)
        if func in LIKE:
            each = self._each(args[0].shape)
            if not each or any(source.rows is not None for source, _ in self._sources):
                return None
            options = {k: v for k, v in named.items() if k not in ("pin_memory",) and v is not None}
            parts = [
                LIKE[func](part, *args[1:], **draw)
                for part, (_, draw) in zip(
                    self._parts(args[0], each), self._with_generators(options), strict=True
                )
            ]
            return self._joined(parts, each)
        return None

    def _each(self, shape: Sequence[int]) -> int:
        """How many rows of the result belong to one row of the batch; 0 if they do not."""
        rows = sum(source.taken for source, _ in self._sources)
        return 0 if not len(shape) or not rows or shape[0] % rows else shape[0] // rows

    def _with_generators(self, named: Mapping[str, Any]) -> list[tuple[Source, dict[str, Any]]]:
        return [(source, {**named, "generator": one}) for source, one in self._sources]

    def _parts(self, tensor: Tensor, each: int) -> list[Tensor]:
        """The rows of every source, of a tensor with those of all."""
        by_row = tensor.reshape(*self._split(len(tensor), each), *tensor.shape[1:])
        parts = by_row.split([source.taken for source, _ in self._sources], self._dim_of_rows)
        return [part.reshape(-1, *tensor.shape[1:]) for part in parts]

    def _joined(self, parts: Sequence[Tensor], each: int) -> Tensor:
        """One tensor of what was drawn for each source, of which some rows may not be taken."""
        taken = []
        for part, (source, _) in zip(parts, self._sources, strict=True):
            by_row = part.reshape(*self._split(len(part), each), *part.shape[1:])
            if source.rows is not None:
                rows = torch.tensor(source.rows, dtype=torch.long)
                by_row = by_row.index_select(self._dim_of_rows, rows)
            taken.append(by_row)
        joined = torch.cat(taken, self._dim_of_rows)
        return joined.reshape(-1, *joined.shape[2:])

    @property
    def _dim_of_rows(self) -> int:
        return 1 if self._in_blocks else 0

    def _split(self, length: int, each: int) -> tuple[int, int]:
        rows = length // each
        return (each, rows) if self._in_blocks else (rows, each)
