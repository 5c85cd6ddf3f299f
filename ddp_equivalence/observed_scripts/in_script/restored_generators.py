"""Lets what a script does to the state of torch's generator hold for those of the ranks too.

Activation checkpointing keeps the state before a part of the forward pass, and restores it to
compute that part again in the backward pass, with the same random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.in_script.rank_generators import RankGenerators, States

MOST_REMEMBERED = 2_000
"""So many states are remembered, of which each has 5 KB for each rank."""


def follow_restored_states(generators: RankGenerators) -> None:
    """Replace the functions of torch that read and set the state of the CPU's generator."""
    remembered: dict[bytes, States] = {}

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
