"""Ranks are dealt to the nodes in turn, as Slurm's cyclic distribution does: 0 1 0 1 for 2x2."""

from __future__ import annotations


def round_robin(ranks_per_node: tuple[int, ...]) -> tuple[int, ...]:
    """The node of every rank; a node that is full is passed over.

    Source: srun(1), ``--distribution=cyclic``.
    """
    turns = range(max(ranks_per_node))
    return tuple(
        node for turn in turns for node, ranks in enumerate(ranks_per_node) if turn < ranks
    )
