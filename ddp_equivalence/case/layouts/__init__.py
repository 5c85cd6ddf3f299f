"""Layouts: a name such as "2x2" stands for a table that says on which node each rank lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from ddp_equivalence.case.errors import BadCase, whole_number, whole_numbers
from ddp_equivalence.case.layouts.packed import packed
from ddp_equivalence.case.layouts.round_robin import round_robin

MAX_WORLD_SIZE = 4096
"""The most ranks that a layout may have."""

MAX_PROCESSES = 64
"""The most ranks that are processes on one machine. With more of them, a check would test what the
machine can bear, and not the training step. More ranks can be simulated."""

ORDERS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "": packed,
    "-round-robin": round_robin,
}
"""Each ending of a layout's name selects the order in which ranks are placed on nodes."""


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank in a layout: one row of its table."""

    rank: int
    node: int
    local_rank: int
    local_world_size: int
    world_size: int
    nodes: int


@dataclass(frozen=True)
class Layout:
    """A table with one row for each rank, in the order of ranks.

    ``str()`` gives the name that it was parsed from.
    """

    name: str
    rows: tuple[RankPlace, ...]

    def __str__(self) -> str:
        return self.name

    @cached_property
    def _by_node(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in range(self.nodes)]
        for row in self.rows:
            ranks[row.node].append(row.rank)
        return tuple(map(tuple, ranks))

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def nodes(self) -> int:
        return self.rows[0].nodes

    @property
    def has_even_nodes(self) -> bool:
        """True if all nodes have equally many ranks."""
        return len({len(self.ranks_on(node)) for node in range(self.nodes)}) == 1

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """The ranks that live on ``node``, in the order of their local rank."""
        return self._by_node[node]


RIGHT = 'nodes x ranks per node such as "2x2", or ranks of each node such as "1+3"'
"""The layouts that are allowed, as an error says it."""


def parse(name: str) -> Layout:
    """The layout called ``name``.

    ``"2x2"`` is 2 nodes with 2 ranks each, and ``"1+3"`` is a node with 1 rank and a node with 3.
    Ranks fill node after node. With ``"-round-robin"`` at the end of the name, they are placed on
    the nodes in turn. Raises BadCase for any other name.
    """
    if not isinstance(name, str):
        raise BadCase("layout", name, _as_text(name))
    return _parse(name)


def _as_text(layout: object) -> str:
    """How to write a layout that is given as numbers."""
    if whole_number(layout) is not None:
        return f'text: layout="1x{layout}" for {layout} ranks on one node'
    numbers = whole_numbers(layout)
    if numbers is not None and len(numbers) == 2:
        return f'text: layout="{numbers[0]}x{numbers[1]}" (nodes x ranks per node)'
    return RIGHT


@cache
def _parse(name: str) -> Layout:
    endings = ", ".join(f'"{ending}"' for ending in ORDERS if ending)
    right = f"{RIGHT}; {endings} may follow"
    ending = max((ending for ending in ORDERS if name.endswith(ending)), key=len)
    sizes = _ranks_per_node(name.removesuffix(ending))
    if not sizes or min(sizes) < 1:
        raise BadCase("layout", name, right)
    if sum(sizes) > MAX_WORLD_SIZE:
        raise BadCase("layout", name, f"at most {MAX_WORLD_SIZE} ranks, not {sum(sizes)}")
    node_of = ORDERS[ending](sizes)
    rows = tuple(
        RankPlace(
            rank=rank,
            node=node,
            local_rank=node_of[:rank].count(node),
            local_world_size=sizes[node],
            world_size=sum(sizes),
            nodes=len(sizes),
        )
        for rank, node in enumerate(node_of)
    )
    return Layout(name, rows)


def _ranks_per_node(text: str) -> tuple[int, ...]:
    if "x" in text:
        nodes, _, ranks = text.partition("x")
        if _is_count(nodes) and _is_count(ranks):
            return (int(ranks),) * int(nodes)
        return ()
    parts = text.split("+")
    return tuple(map(int, parts)) if len(parts) > 1 and all(map(_is_count, parts)) else ()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4
