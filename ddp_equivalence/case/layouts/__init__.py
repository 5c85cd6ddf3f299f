"""Who is rank r: the table (rank, node, local rank, ranks on node, world) behind a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts.packed import packed
from ddp_equivalence.case.layouts.round_robin import round_robin

MAX_WORLD_SIZE = 64
"""Ranks are processes of this machine; more of them measure the machine, not the rule."""

ORDERS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "": packed,
    "-round-robin": round_robin,
}
"""How ranks are dealt to nodes, by the ending of the layout's name."""


@dataclass(frozen=True)
class Row:
    """One line of the table: where rank ``rank`` lives."""

    rank: int
    node: int
    local_rank: int
    local_world_size: int
    world_size: int
    nodes: int


@dataclass(frozen=True)
class Layout:
    """A named table of ranks; ``str()`` gives the name it was parsed from."""

    name: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def nodes(self) -> int:
        return self.rows[0].nodes

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """The global ranks that live on ``node``, in the order of their local rank."""
        return tuple(row.rank for row in self.rows if row.node == node)


@cache
def parse(name: str) -> Layout:
    """The layout called ``name``: ``"2x2"``, nodes x ranks per node; ``"1+3"``, ranks of each node.

    ``"2x2-round-robin"`` deals the ranks to the nodes in turn instead of filling node after node.
    Raises BadCase for any other name.
    """
    right = 'nodes x ranks per node such as "2x2", or ranks of each node such as "1+3"'
    right += '; "-round-robin" may follow'
    if not isinstance(name, str):
        raise BadCase("layout", name, right)
    ending = max((ending for ending in ORDERS if name.endswith(ending)), key=len)
    sizes = _ranks_per_node(name.removesuffix(ending))
    if not sizes or min(sizes) < 1:
        raise BadCase("layout", name, right)
    if sum(sizes) > MAX_WORLD_SIZE:
        raise BadCase("layout", name, f"at most {MAX_WORLD_SIZE} ranks, this is {sum(sizes)}")
    node_of = ORDERS[ending](sizes)
    rows = tuple(
        Row(
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
        if _is_count(nodes) and _is_count(ranks) and int(nodes) <= MAX_WORLD_SIZE:
            return (int(ranks),) * int(nodes)
        return ()
    parts = text.split("+")
    return tuple(map(int, parts)) if len(parts) > 1 and all(map(_is_count, parts)) else ()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4
