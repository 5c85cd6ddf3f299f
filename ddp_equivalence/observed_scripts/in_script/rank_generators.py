"""Lets one process draw, for the rows of several ranks, the random numbers that each rank drew.

A random operation whose result has entries for each row of the batch is cut into parts, and each
part is drawn by a generator in the state that its rank's was in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.observed_scripts.in_script.caller import place_of_caller
from ddp_equivalence.observed_scripts.in_script.generator_states import (
    default_generator,
    set_generator_state,
    state_for,
)
from ddp_equivalence.observed_scripts.in_script.random_operations import (
    DRAW_NOTHING,
    IN_PLACE,
    LIKE,
    LIKE_VALUES,
    MADE,
    OF_DIM_0,
    device_of,
    drops_something,
    first_tensor,
)
from ddp_equivalence.observed_scripts.in_script.rows_in_tensor import RowsInTensor
from ddp_equivalence.observed_scripts.query import RowOrder


@dataclass(frozen=True)
class Source:
    """``state``: of a rank's generators; None if it is not known. ``count``: the rows of that rank.
    ``rows``: which of them are in this process's batch; None for all. ``rank``: its number.
    """

    state: Tensor | None
    count: int
    rows: tuple[int, ...] | None
    rank: int = 0

    @property
    def taken(self) -> int:
        """The number of its rows in this process's batch."""
        return self.count if self.rows is None else len(self.rows)


def _copied(result: Any) -> Any:
    return pytree.tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, result)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


States = list[dict[str, Tensor]]
"""For each source, the state of its generator by the kind of device."""


class RankGenerators(TorchDispatchMode):
    """``missed``: how often each operation, which draws no rows, drew what not every rank drew.

    ``counts``: whether that is counted now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed: dict[str, int] = {}
        self.alike: dict[str, None] = {}
        self.counts = True
        self._sources: list[Source] = []
        self._states: States = []
        self._made: dict[int, None] = {}  # so many rows the script made on each rank by itself
        self._on = False
        self._row_order: RowOrder = "by row"

    def use(self, sources: Sequence[Source], draws: bool, row_order: RowOrder = "by row") -> None:
        """Draw from these from now on. ``draws``: the script draws random numbers at all.
        ``row_order``: that of what is drawn.
        """
        self._sources, self._states = [], []
        self._row_order = row_order
        if not draws or any(source.state is None for source in sources):
            return
        if len(sources) == 1 and sources[0].rows is None:
            state = sources[0].state
            assert state is not None
            set_generator_state(state)
            return
        self._sources, self._states = list(sources), [{} for _ in sources]
        self.begin()

    def begin(self) -> None:
        """Be told of every operation from now on, until the process ends."""
        if not self._on:
            self._on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    @property
    def active(self) -> bool:
        """This process draws for several sources now."""
        return bool(self._sources)

    def states(self) -> States:
        """Those of the sources now."""
        return [dict(one) for one in self._states]

    def restore(self, states: States) -> None:
        """Go back to states of the same sources."""
        if len(states) == len(self._states):
            self._states = [dict(one) for one in states]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Draw as usual inside the block, in which a loader makes a batch that is not used."""
        sources, self._sources = self._sources, []
        try:
            yield
        finally:
            self._sources = sources

    def forget(self) -> None:
        """Draw as usual from now on, where a step begins."""
        self._sources, self._states, self._made = [], [], {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if not self._sources or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **named)
        if func in DRAW_NOTHING or "out" in named or named.get("generator") is not None:
            return func(*args, **named)
        if not drops_something(func, args, named):
            return func(*args, **named)
        drawn, read = self._drawn(func, args, named), self._sources
        for count in () if drawn is not None else self._made:
            self._sources = [replace(source, count=count, rows=None) for source in read]
            drawn = self._drawn(func, args, named)
            self._sources = read
            if drawn is not None:
                break
        return self._drawn_by_each(func, args, named) if drawn is None else drawn

    def _drawn_by_each(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What the first rank drew, where no rows are drawn: right if every rank drew the same.
        A new tensor for the rows of one rank becomes one for those of all.

        The generators of all ranks move on.
        """
        device = device_of(args, named)
        if (func._schema.is_mutable and func not in IN_PLACE) or not self._is_known(device):
            self._note_missed(func)  # it is not known what it writes to, or from what it draws
            return func(*args, **named)
        results = []
        for number in range(len(self._sources)):
            with self._drawing_as(number, device):
                results.append(_copied(func(*args, **named)))
        if not all(_equal(results[0], one) for one in results):
            if func in MADE and (rows := self._rows_that_were_made(results)) is not None:
                return rows
            self._note_missed(func)
        if func._schema.is_mutable:
            args[0].copy_(results[0])
            return args[0]
        return results[0]

    def _rows_that_were_made(self, made: Sequence[Tensor]) -> Tensor | None:
        """Those of all ranks, if the script makes as many rows on each rank as it reads there, or a
        part of them, or a multiple, whatever its loader gives. None if these are no rows.
        """
        count, length = self._sources[0].count, len(made[0]) if made[0].ndim else 0
        if any(one.count != count for one in self._sources) or len(self._sources) < 2:
            return None
        if length == count:
            return torch.cat(
                [
                    one if of.rows is None else one[list(of.rows)]
                    for one, of in zip(made, self._sources, strict=True)
                ]
            )
        are_all = all(one.taken == count for one in self._sources)
        if length < 2 or (length % count and count % length) or not are_all:
            return None
        self._made[length] = None
        return torch.cat([*made])

    def _note_missed(self, func: Any) -> None:
        if self.counts:
            self.missed[str(func)] = self.missed.get(str(func), 0) + 1

    def _is_known(self, device: torch.device) -> bool:
        """The state of every rank's generator of this device is."""
        return default_generator(device) is not None and all(
            source.state is not None and state_for(device, source.state) is not None
            for source in self._sources
        )

    @contextmanager
    def _drawing_as(self, number: int, device: torch.device) -> Iterator[None]:
        """Inside the block, torch draws on this device what one source draws next."""
        generator = default_generator(device)
        assert generator is not None
        kept = generator.get_state()
        generator.set_state(self._state(number, device))
        try:
            yield
        finally:
            self._states[number][device.type] = generator.get_state()
            generator.set_state(kept)

    def _state(self, number: int, device: torch.device) -> Tensor:
        """That of one source now. A device without a number is the current one."""
        states, state = self._states[number], self._sources[number].state
        if device.type not in states:
            of_device = None if state is None else state_for(device, state)
            assert of_device is not None
            states[device.type] = of_device
        return states[device.type]

    def _note_alike(self, device: torch.device) -> None:
        """Remember the line, if all ranks draw the same numbers for their rows there."""
        first, *others = (self._state(number, device) for number in range(len(self._sources)))
        are_alike = all(torch.equal(first, other) for other in others)
        if are_alike and len({one.rank for one in self._sources}) > 1:
            self.alike[str(place_of_caller())] = None

    def _drawn(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The result of an operation that draws rows; None if it does not."""
        device = device_of(args, named)
        if func not in IN_PLACE | MADE | LIKE | LIKE_VALUES or not self._is_known(device):
            return None
        if func in LIKE_VALUES and any(source.rows is not None for source in self._sources):
            return None
        size = args[-1] if func in MADE else first_tensor(args).shape
        rows = sum(source.taken for source in self._sources)
        where = RowsInTensor.of(size, rows, self._row_order)
        if where is None or (where.dim and func in OF_DIM_0):
            return None
        self._note_alike(device)
        results = []
        for number, source in enumerate(self._sources):
            if func in MADE:
                given = (*args[:-1], where.shape(size, source.count))
            else:
                given = tuple(self._all_rows(one, where, len(size), number) for one in args)
            with self._drawing_as(number, device):
                results.append(func(*given, **named))
        if isinstance(results[0], tuple):  # a dropout returns its mask too
            return tuple(self._joined(parts, where) for parts in zip(*results, strict=True))
        joined = self._joined(results, where)
        return args[0].copy_(joined) if func in IN_PLACE else joined

    def _all_rows(self, argument: Any, where: RowsInTensor, ndim: int, number: int) -> Any:
        """An argument with all rows of one source in the place of those of every source."""
        counts = [source.taken for source in self._sources]
        if not isinstance(argument, Tensor) or argument.ndim != ndim:
            return argument
        if argument.shape[where.dim] != where.each * sum(counts):
            return argument
        rows, source = where.split(argument, counts)[number], self._sources[number]
        if source.rows is not None:
            return where.with_rows(rows, source.count, source.rows)
        return where.empty(argument, source.count).copy_(rows)

    def _joined(self, drawn: Sequence[Tensor], where: RowsInTensor) -> Tensor:
        """One tensor of what was drawn for each source, of which some rows may not be taken."""
        pairs = zip(drawn, self._sources, strict=True)
        return where.joined(
            [one if of.rows is None else where.rows_of(one, of.rows) for one, of in pairs]
        )
