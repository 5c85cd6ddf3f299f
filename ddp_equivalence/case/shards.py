"""Split the examples of a big batch into one shard for each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_equivalence.case.errors import BadCase, whole_numbers

OWN = "own"
"""With these shards, every rank receives the whole batch and chooses its examples itself."""


@dataclass(frozen=True)
class Shards:
    """The examples assigned to every rank.

    ``indices[r]`` are the positions of rank r's examples in the big batch. ``examples`` is the
    number of examples in the big batch.
    """

    indices: tuple[tuple[int, ...], ...]
    examples: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(indices) for indices in self.indices)


def _equal(examples: int, world_size: int) -> tuple[int, ...]:
    if examples % world_size:
        right = f"used with examples whose number is a multiple of the {world_size} ranks, not "
        right += f"{examples}; or give the size of each shard, as in shards='5+3'"
        raise BadCase("shards", "equal", right)
    return (examples // world_size,) * world_size


def _uneven(examples: int, world_size: int) -> tuple[int, ...]:
    """Rank r gets examples in proportion to r + 1; the last rank also gets the remainder."""
    parts = world_size * (world_size + 1) // 2
    sizes = [examples * (rank + 1) // parts for rank in range(world_size)]
    sizes[-1] += examples - sum(sizes)
    return tuple(sizes)


def _one_example(examples: int, world_size: int) -> tuple[int, ...]:
    """Rank 0 gets one example. The others get equally many; the last also gets the remainder."""
    if world_size == 1:
        return (examples,)
    each = (examples - 1) // (world_size - 1)
    return (1, *[each] * (world_size - 2), examples - 1 - each * (world_size - 2))


def _empty(examples: int, world_size: int) -> tuple[int, ...]:
    """The last rank gets no example. The shards of the others differ by at most one example."""
    if world_size == 1:
        return (examples,)
    each, left_over = divmod(examples, world_size - 1)
    return (*[each + (rank < left_over) for rank in range(world_size - 1)], 0)


NAMED_SIZES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "equal": _equal,
    "interleaved": _equal,
    "no_valid_token": _equal,
    "uneven": _uneven,
    "one_example": _one_example,
    "empty": _empty,
}
"""Each name's function (examples, world size) -> examples per rank. With ``no_valid_token`` the
shards are equal, and the catalogue's batch pads every target in the shard of the last rank."""


def explicit_sizes(text: str, world_size: int) -> tuple[int, ...] | None:
    """The examples per rank that ``"5+3"`` spells out, or None if ``text`` is a name.

    Raises BadCase if the text is neither, or if it has more or fewer shards than there are ranks.
    """
    names = ", ".join([*NAMED_SIZES, OWN])
    right = f'examples per rank such as "5+3", or one of {names}'
    if not isinstance(text, str):
        raise BadCase("shards", text, _as_text(text) or right)
    if text == OWN or text in NAMED_SIZES:
        return None
    parts = text.split("+")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadCase("shards", text, right)
    if len(parts) != world_size:
        raise BadCase("shards", text, f"one size for each rank: {world_size}, not {len(parts)}")
    return tuple(map(int, parts))


def _as_text(sizes: object) -> str:
    """How to write sizes that are given as numbers; "" if they are no numbers."""
    numbers = whole_numbers(sizes)
    return f'text: shards="{"+".join(map(str, numbers))}"' if numbers else ""


def split(text: str, examples: int, world_size: int) -> Shards:
    """Assign ``examples`` examples to ``world_size`` ranks as ``text`` says.

    Raises BadCase if the shards' sizes do not add up to ``examples``.
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
