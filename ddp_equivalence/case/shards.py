"""Which rank gets which examples, and whether that is a partition of the big batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ddp_equivalence.case.errors import BadCase

OWN = "own"
"""Every rank receives the whole batch and takes its examples itself."""


@dataclass(frozen=True)
class Shards:
    """``indices[r]`` are the examples of rank r, as positions in the big batch of ``examples``."""

    indices: tuple[tuple[int, ...], ...]
    examples: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(indices) for indices in self.indices)

    @property
    def is_partition(self) -> bool:
        """True if every example of the big batch is on exactly one rank."""
        counts = Counter(index for indices in self.indices for index in indices)
        return counts == dict.fromkeys(range(self.examples), 1)


def _equal(examples: int, world_size: int) -> tuple[int, ...]:
    if examples % world_size:
        right = f"a multiple of {world_size} ranks, or name the sizes, as in shards='5+3'"
        raise BadCase("shards", f"equal, of {examples} examples", right)
    return (examples // world_size,) * world_size


def _uneven(examples: int, world_size: int) -> tuple[int, ...]:
    """Rank r gets about r + 1 parts: no two neighbours are alike."""
    parts = world_size * (world_size + 1) // 2
    sizes = [examples * (rank + 1) // parts for rank in range(world_size)]
    sizes[-1] += examples - sum(sizes)
    return tuple(sizes)


def _one_example(examples: int, world_size: int) -> tuple[int, ...]:
    """Rank 0 gets a single example; the last rank takes what does not divide."""
    if world_size == 1:
        return (examples,)
    each = (examples - 1) // (world_size - 1)
    return (1, *[each] * (world_size - 2), examples - 1 - each * (world_size - 2))


def _empty(examples: int, world_size: int) -> tuple[int, ...]:
    """The last rank gets no example, the others as even as it goes."""
    if world_size == 1:
        return (examples,)
    each, left = divmod(examples, world_size - 1)
    return (*[each + (rank < left) for rank in range(world_size - 1)], 0)


NAMED_SIZES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "equal": _equal,
    "interleaved": _equal,
    "no_valid_token": _equal,
    "uneven": _uneven,
    "one_example": _one_example,
    "empty": _empty,
}
"""(examples, world size) -> examples per rank. ``no_valid_token`` is about what is in the shard:
the catalogue's batch pads every target of the last rank."""


def explicit_sizes(text: str, world_size: int) -> tuple[int, ...] | None:
    """The sizes in ``"5+3"``, or None for one of the names.

    Raises BadCase where the text is neither, or has another number of shards than ranks.
    """
    if text == OWN or text in NAMED_SIZES:
        return None
    names = ", ".join([*NAMED_SIZES, OWN])
    right = f'examples per rank such as "5+3", or one of {names}'
    if not isinstance(text, str):
        raise BadCase("shards", text, right)
    parts = text.split("+")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadCase("shards", text, right)
    if len(parts) != world_size:
        raise BadCase("shards", text, f"one size a rank: {world_size}, not {len(parts)}")
    return tuple(map(int, parts))


def split(text: str, examples: int, world_size: int) -> Shards:
    """Deal ``examples`` to ``world_size`` ranks as ``text`` says.

    Raises BadCase if the sizes do not add up to the batch.
    """
    if text == OWN:
        return Shards((tuple(range(examples)),) * world_size, examples)
    sizes = explicit_sizes(text, world_size) or NAMED_SIZES[text](examples, world_size)
    if sum(sizes) != examples:
        right = f"sizes that add up to the {examples} examples of the batch, not {sum(sizes)}"
        raise BadCase("shards", text, right)
    if text == "interleaved":
        return Shards(
            tuple(tuple(range(rank, examples, world_size)) for rank in range(world_size)), examples
        )
    starts = [sum(sizes[:rank]) for rank in range(world_size)]
    return Shards(
        tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)),
        examples,
    )
