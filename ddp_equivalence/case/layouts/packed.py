"""Ranks fill node after node, as torchrun numbers them: the ranks of 2x2 are on nodes 0 0 1 1."""

from __future__ import annotations


def packed(ranks_per_node: tuple[int, ...]) -> tuple[int, ...]:
    """The node of every rank."""
    return tuple(node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks))
