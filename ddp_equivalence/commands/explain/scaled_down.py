"""A smaller setup that can run here, with as many ranks and micro-batches as possible."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence.commands.explain.arithmetic import explain
from ddp_equivalence.commands.explain.setup import Setup

MOST_RANKS = 8
MOST_RANKS_A_NODE = 4
"""The most ranks on each node if there are several nodes, so that there still are several."""
MOST_MICRO_BATCHES = 32
SMALL_BATCH = 6
MOST_TOLD_APART = 96
"""The most examples whose shares the gradients of the small models can tell apart."""


def scaled_down(setup: Setup) -> tuple[Setup, tuple[str, ...]]:
    """The smaller setup, and phrases that say how it differs from ``setup``."""
    ranks, nodes = setup.ranks_per_node, setup.nodes
    if setup.parallelism == "hybrid" or setup.processes > 1 or setup.replicas > 1:
        ranks = min(ranks, MOST_RANKS if nodes == 1 else MOST_RANKS_A_NODE)
        together = 1 if setup.parallelism == "hybrid" else ranks
        nodes = min(nodes, MOST_RANKS // together)
    small = replace(
        setup,
        nodes=nodes,
        ranks_per_node=ranks,
        examples=None,
        drop_last=False,
    )
    small = replace(small, batch=_small_batch(setup, small))
    micro_batches = min(setup.accumulation, _most_micro_batches(small))
    small = replace(small, accumulation=micro_batches)
    differences = []
    if (nodes, ranks) != (setup.nodes, setup.ranks_per_node):
        now, was = f"{nodes} x {ranks}", f"{setup.nodes} x {setup.ranks_per_node}"
        differences.append(f"nodes x ranks per node {now} instead of {was}")
    if micro_batches != setup.accumulation:
        differences.append(f"{micro_batches} micro-batches instead of {setup.accumulation}")
    if small.batch != setup.batch:
        differences.append(f"batch {small.batch} instead of {setup.batch}")
    return small, tuple(differences)


def _small_batch(setup: Setup, small: Setup) -> int:
    """The largest small batch that is dealt to the replicas as evenly as the real one."""
    limit = max(SMALL_BATCH, 3 * small.replicas)

    def shape(dealt: Setup) -> tuple[bool, bool]:
        return len(dealt.replica_sizes) == dealt.replicas, len(set(dealt.replica_sizes)) == 1

    wanted = shape(setup)
    sizes = range(min(setup.batch, limit), 0, -1)
    return next((n for n in sizes if shape(replace(small, batch=n)) == wanted), sizes[0])


def _most_micro_batches(small: Setup) -> int:
    if explain(small).is_multiple:
        return MOST_MICRO_BATCHES
    return max(2, MOST_TOLD_APART // (small.batch * small.processes))
