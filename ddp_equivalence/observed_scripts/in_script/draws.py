"""Draws in one process the random numbers that each rank drew for its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.measurement.draws import draws_numbers
from ddp_equivalence.observed_scripts.in_script.kept_tensors import place_of_caller
from ddp_equivalence.observed_scripts.queries import RowOrder
from ddp_equivalence.observed_scripts.record import GeneratorStates, text_of_line

# Lets one process draw, for the rows of several ranks, the random numbers that each rank drew.
#
# A random operation whose result has entries for each row of the batch is cut into parts, and
# each part is drawn by a generator in the state that its rank's was in.


@dataclass
class Source:
    """``states``: of a rank's generators, which move on when this process draws from them; {} if
    they are not known. ``count``: the rows of that rank. ``rows``: which of them are in this
    process's batch; None for all. ``rank``: its number.
    """

    states: GeneratorStates
    count: int
    rows: tuple[int, ...] | None
    rank: int = 0

    @property
    def taken(self) -> int:
        """The number of its rows in this process's batch."""
        return self.count if self.rows is None else len(self.rows)

    def draws(self, device: torch.device, draw: Callable[[], Any]) -> Any:
        """Let torch draw on this device, inside of ``draw``, what this source draws next."""
        generator = default_generator(device)
        assert generator is not None
        kept = generator.get_state()
        generator.set_state(self.states[device.type])
        try:
            return draw()
        finally:
            self.states[device.type] = generator.get_state()
            generator.set_state(kept)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


class RankGenerators(TorchDispatchMode):
    """``missed``: how often each operation, which draws no rows, drew what not every rank drew.

    ``counts``: whether that is counted now. ``alike``: the lines at which all ranks drew the same
    numbers for their rows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed: dict[str, int] = {}
        self.alike: dict[str, None] = {}
        self.counts = True
        self._sources: list[Source] = []
        self._made: dict[int, None] = {}  # so many rows the script made on each rank by itself
        self._on = False
        self._row_order: RowOrder = "by row"

    def use(self, sources: Sequence[Source], draws: bool, row_order: RowOrder = "by row") -> None:
        """Draw from these from now on. ``draws``: the script draws random numbers at all.
        ``row_order``: that of what is drawn.
        """
        self._sources, self._row_order = [], row_order
        if not draws or not all(one.states for one in sources):
            return
        if len(sources) == 1 and sources[0].rows is None:
            set_generator_states(sources[0].states)
            return
        for one in sources:
            states = {kind: state.clone() for kind, state in one.states.items()}
            self._sources.append(replace(one, states=states))
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

    def states(self) -> list[GeneratorStates]:
        """The states of the sources now."""
        return [dict(one.states) for one in self._sources]

    def restore(self, states: Sequence[GeneratorStates]) -> None:
        """Go back to states of the same sources."""
        if len(states) == len(self._sources):
            for one, known in zip(self._sources, states, strict=True):
                one.states = dict(known)

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
        self._sources, self._made = [], {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if not self._sources or not draws_numbers(func, args, named):
            return func(*args, **named)
        if "out" in named or named.get("generator") is not None:
            return func(*args, **named)
        device = device_of(args, named)
        is_known = all(device.type in one.states for one in self._sources)
        writes = func._schema.is_mutable and func not in IN_PLACE
        if writes or not is_known or default_generator(device) is None:
            self._note_missed(func)  # it is not known what it writes to, or from what it draws
            return func(*args, **named)
        size: Sequence[int] = ()
        if func in IN_PLACE | MADE | LIKE:
            size = args[-1] if func in MADE else first_tensor(args).shape
        read = self._sources
        made = ([replace(one, count=rows, rows=None) for one in read] for rows in self._made)
        for sources in (read, *made):
            rows = sum(one.taken for one in sources)
            where = RowsInTensor.of(size, rows, self._row_order)
            if where is not None and not (where.dim and func in OF_DIM_0):
                self._note_alike(device)
                return _rows_drawn(sources, where, device, func, args, named)
        return self._drawn_by_each(device, func, args, named)

    def _drawn_by_each(
        self, device: torch.device, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Draw as the first rank did, where no rows are drawn: right if every rank drew the same.
        A new tensor for the rows of one rank becomes one for those of all.

        The generators of all ranks move on.
        """

        def draw() -> Any:
            drawn = func(*args, **named)
            return pytree.tree_map_only(Tensor, Tensor.clone, drawn)  # it may be written to again

        results = [one.draws(device, draw) for one in self._sources]
        if not all(_equal(results[0], one) for one in results):
            if func in MADE and (rows := self._rows_that_were_made(results)) is not None:
                return rows
            self._note_missed(func)
        return args[0].copy_(results[0]) if func in IN_PLACE else results[0]

    def _rows_that_were_made(self, made: Sequence[Tensor]) -> Tensor | None:
        """Join the rows of all ranks, if the script makes as many rows on each rank as it reads
        there, or a part of them, or a multiple, whatever its loader gives. None if these are none.
        """
        count, length = self._sources[0].count, len(made[0]) if made[0].ndim else 0
        if len(self._sources) < 2 or {one.count for one in self._sources} != {count}:
            return None
        if length == count:
            pairs = zip(made, self._sources, strict=True)
            return torch.cat([one if of.rows is None else one[list(of.rows)] for one, of in pairs])
        are_all = all(one.taken == count for one in self._sources)
        if length < 2 or (length % count and count % length) or not are_all:
            return None
        self._made[length] = None
        return torch.cat([*made])

    def _note_missed(self, func: Any) -> None:
        if self.counts:
            self.missed[str(func)] = self.missed.get(str(func), 0) + 1

    def _note_alike(self, device: torch.device) -> None:
        """Remember the line, if all ranks draw the same numbers for their rows there."""
        first, *others = (one.states[device.type] for one in self._sources)
        several = len({one.rank for one in self._sources}) > 1
        if several and all(torch.equal(first, other) for other in others):
            self.alike[text_of_line(place_of_caller())] = None


def _rows_drawn(
    sources: Sequence[Source],
    where: RowsInTensor,
    device: torch.device,
    func: Any,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Any:
    """The result of an operation that draws the rows of these sources."""
    counts = [one.taken for one in sources]
    ndim = len(args[-1]) if func in MADE else first_tensor(args).ndim

    def given(argument: Any, number: int, source: Source) -> Any:
        """An argument with all rows of one source in the place of those of every source."""
        if not isinstance(argument, Tensor) or argument.ndim != ndim:
            return argument
        if argument.shape[where.dim] != where.each * sum(counts):
            return argument
        first = sum(counts[:number])
        rows = where.rows_of(argument, range(first, first + counts[number]))
        if source.rows is not None:
            return where.with_rows(rows, source.count, source.rows)
        return where.empty(argument, source.count).copy_(rows)

    def joined(drawn: Sequence[Tensor]) -> Tensor:
        pairs = zip(drawn, sources, strict=True)
        return where.joined(
            [one if of.rows is None else where.rows_of(one, of.rows) for one, of in pairs]
        )

    results = []
    for number, source in enumerate(sources):
        if func in MADE:
            arguments = (*args[:-1], where.shape(args[-1], source.count))
        else:
            arguments = tuple(given(one, number, source) for one in args)
        results.append(source.draws(device, partial(func, *arguments, **named)))
    if isinstance(results[0], tuple):  # a dropout returns its mask too
        return tuple(map(joined, zip(*results, strict=True)))
    return args[0].copy_(joined(results)) if func in IN_PLACE else joined(results)


# Lets what a script does to the state of torch's generator hold for those of the ranks too.
#
# Activation checkpointing keeps the state before a part of the forward pass, and restores it to
# compute that part again in the backward pass, with the same random numbers.

MOST_REMEMBERED = 2_000
"""So many states are remembered, of which each has 5 KB for each rank."""


def follow_restored_states(generators: RankGenerators) -> None:
    """Replace the functions of torch that read and set the state of the CPU's generator."""
    remembered: dict[bytes, list[GeneratorStates]] = {}

    def get_rng_state() -> Tensor:
        """The state, and another one each time, by which that of the ranks is known."""
        if not generators.active:
            return torch.default_generator.get_state()
        torch.rand([], generator=torch.default_generator)
        state = torch.default_generator.get_state()
        if len(remembered) >= MOST_REMEMBERED:
            remembered.pop(next(iter(remembered)))
        remembered[state.numpy().tobytes()] = generators.states()
        return state

    def set_rng_state(state: Tensor) -> None:
        torch.default_generator.set_state(state)
        if generators.active and (known := remembered.get(state.numpy().tobytes())) is not None:
            generators.restore(known)

    for module in (torch, torch.random):
        names: Any = module
        names.get_rng_state, names.set_rng_state = get_rng_state, set_rng_state


# The operations of torch that draw random numbers, and how each of them draws.

aten: Any = torch.ops.aten

IN_PLACE = {
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.uniform_.default, aten.normal_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to),
    *(aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default),
}
"""Operations that fill their first argument."""

MADE = {
    *(aten.rand.default, aten.randn.default, aten.normal.float_float),
    *(aten.randint.default, aten.randint.low),
}
"""Operations that make a tensor of a given size, which is the last of their arguments."""

LIKE = {
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.randint_like.default, aten.randint_like.low_dtype),
    *(aten.native_dropout.default, aten._fused_dropout.default),
    *(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor, aten.multinomial.default),
    *(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor),
}
"""Operations that make tensors with the rows of their first tensor. How many numbers they draw
depends on its shape alone. A dropout on a GPU is one of them; on the CPU it is made of others.
"""

OF_DIM_0 = {aten.multinomial.default}
"""The rows of these are in dim 0 at any rate."""


def device_of(args: Sequence[Any], named: Mapping[str, Any]) -> torch.device:
    """Where an operation draws."""
    if named.get("device") is not None:
        return torch.device(named["device"])
    tensor = first_tensor(args)
    return torch.device("cpu") if tensor is None else tensor.device


def first_tensor(args: Sequence[Any]) -> Any:
    """The first tensor among the arguments; None if there is none."""
    return next((one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)), None)


# Where a tensor has the entries of each row of a batch.


@dataclass(frozen=True)
class RowsInTensor:
    """``dim``: in which the rows follow one another. ``each``: so many entries of it belong to each
    row. ``in_blocks``: the first entries of all rows come first, and then the second ones;
    otherwise those of one row stand together.
    """

    dim: int
    each: int
    in_blocks: bool

    @classmethod
    def of(cls, shape: Sequence[int], rows: int, row_order: RowOrder) -> RowsInTensor | None:
        """Where a tensor of this shape has so many rows; None if it has none.

        A sequence model may have the time in dim 0 and the batch in dim 1, and numbers may belong
        to no row. The length of a dimension may be a multiple of the number of rows by chance:
        ``row_order`` says what is meant.
        """
        if not rows or not len(shape) or row_order == "no rows":
            return None
        if row_order == "in dim 1" and len(shape) > 2 and shape[1] == rows:
            return cls(1, 1, False)
        if not shape[0] or shape[0] % rows:
            return None
        return cls(0, shape[0] // rows, row_order == "in blocks")

    def shape(self, shape: Sequence[int], rows: int) -> list[int]:
        """The shape of a tensor that has so many rows, and is like one of this shape otherwise."""
        return [rows * self.each if dim == self.dim else size for dim, size in enumerate(shape)]

    def empty(self, tensor: Tensor, rows: int) -> Tensor:
        """A tensor of so many rows whose dimensions lie in memory as those of the other tensor do:
        random numbers are drawn in the order of the memory.
        """
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
        shape = self.shape(tensor.shape, rows)
        empty = tensor.new_empty([shape[dim] for dim in order])
        return empty.permute([order.index(dim) for dim in range(tensor.ndim)])

    def with_rows(self, tensor: Tensor, count: int, rows: Sequence[int]) -> Tensor:
        """A tensor of ``count`` rows, in which those with these numbers are those of ``tensor``.

        The others are 1, which is right as a probability and as a weight.
        """
        full = self.empty(tensor, count).fill_(1)
        places = torch.tensor([*rows], device=tensor.device)
        self._opened(full).index_copy_(self._dim_of_rows, places, self._opened(tensor))
        return full

    def rows_of(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows with these numbers."""
        places = torch.tensor([*rows], device=tensor.device)
        taken = self._opened(tensor).index_select(self._dim_of_rows, places)
        return taken.flatten(self.dim, self.dim + 1)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all of them."""
        together = torch.cat([*map(self._opened, parts)], self._dim_of_rows)
        return together.flatten(self.dim, self.dim + 1)

    @property
    def _dim_of_rows(self) -> int:
        return self.dim + self.in_blocks

    def _opened(self, tensor: Tensor) -> Tensor:
        """A view in which the rows have a dim of their own, and the entries of a row another."""
        sizes = (self.each, -1) if self.in_blocks else (-1, self.each)
        opened: Tensor = tensor.unflatten(self.dim, sizes)
        return opened


# The states of torch's default random generators in one process: the CPU's and its CUDA device's.
#
# A dropout on a GPU draws from the generator of the GPU alone.

_followed: list[int] = []
"""The number of the device whose generator is followed, once it is known."""


def follow_device(device: torch.device) -> None:
    """From now on, the CUDA device of this process is the one that its model is on: a script may
    never have made it the current one.
    """
    if device.type == "cuda" and device.index is not None:
        _followed[:] = [device.index]


def generator_states() -> GeneratorStates:
    """The states of the default generators now."""
    return {kind: generator.get_state() for kind, generator in _generators().items()}


def set_generator_states(states: GeneratorStates) -> None:
    """Let the default generators be in these states, as far as they are known."""
    for kind, generator in _generators().items():
        if kind in states:
            generator.set_state(states[kind].clone())


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator from which this process draws on a device; None if its state is not kept. A
    device without a number is the current one.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if index != _number():
            return None
    return _generators().get(device.type)


def _generators() -> dict[str, torch.Generator]:
    """By the kind of device. If CUDA is the CPU (``--as-cpu``), there is none of CUDA."""
    of_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return {"cpu": torch.default_generator} | ({"cuda": of_cuda[_number()]} if of_cuda else {})


def _number() -> int:
    return _followed[0] if _followed else torch.cuda.current_device()
