"""Ranks are placed on the nodes in turn, as Slurm does: the ranks of 2x2 are on nodes 0 1 0 1."""

from __future__ import annotations


def round_robin(ranks_per_node: tuple[int, ...]) -> tuple[int, ...]:
    """The node of every rank. A node that has all its ranks is skipped.

    Source: srun(1), ``--distribution=cyclic``.
    """
    turns = range(max(ranks_per_node))
    return tuple(
        node for turn in turns for node, ranks in enumerate(ranks_per_node) if turn < ranks
    )
