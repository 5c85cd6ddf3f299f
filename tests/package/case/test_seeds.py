"""Weights and data are drawn from streams of their own, so that no weight equals an input."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import Case
from ddp_equivalence.case.build import build_batches, build_model
from ddp_equivalence.case.random_state import (
    batch_seed,
    draws_noticed,
    generator_seed,
    seeded,
    step_seed,
)
from tests.package.own_cases import own_case

SEEDS = (0, 1, 2**31, 2**32 - 1, 2**62 - 1)


class Drawn(nn.Module):
    """Weights drawn from torch, numpy and random, with the shape of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = nn.Parameter(torch.randn(16, 3))
        self.numpy = nn.Parameter(torch.from_numpy(np.random.standard_normal((16, 3))))
        self.random = nn.Parameter(torch.tensor([[random.random()] * 3] * 16))


def drawn_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "generator": torch.randn(16, 3, generator=generator),
        "torch": torch.randn(16, 3),
        "numpy": torch.from_numpy(np.random.standard_normal((16, 3))),
        "random": torch.tensor([[random.random()] * 3] * 16),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_no_weight_equals_the_data_that_are_drawn_with_its_shape(seed: int) -> None:
    case = own_case(model=Drawn, batch=drawn_batch, seed=seed)
    weights = [parameter.detach() for parameter in build_model(case).parameters()]
    data = list(build_batches(case)[0].values())
    for place, one in enumerate(data):
        assert not any(torch.equal(one, other) for other in (*weights, *data[:place]))
        assert not any(torch.allclose(one[0], weight[0]) for weight in weights)


def test_the_inputs_of_the_catalogue_are_not_drawn_from_the_seed_of_the_model() -> None:
    case = Case(model="linear", loss="mse_mean", examples=4)
    inputs: Any = build_batches(case)[0]["inputs"]
    drawn = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(case.seed)).double()
    assert not torch.equal(inputs, drawn)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seeds_of_a_case_differ_also_modulo_2_to_the_32(seed: int) -> None:
    steps = [step_seed(own_case(seed=seed), step) for step in range(3)]
    seeds = [seed, batch_seed(seed), generator_seed(seed), *steps]
    assert len({one % 2**32 for one in seeds}) == len(seeds)
    assert max(seeds) < 2**63


@pytest.mark.parametrize(
    ("draw", "noticed"),
    [
        (lambda: torch.rand(1), True),
        (lambda: np.random.uniform(), True),
        (random.random, True),
        (lambda: torch.ones(1), False),
        (lambda: torch.rand(1, generator=torch.Generator()), False),
    ],
)
def test_numbers_that_are_drawn_after_a_seed_are_noticed(draw: Any, noticed: bool) -> None:
    with draws_noticed() as inside:
        with seeded(3):
            draw()
        with seeded(3):
            pass
    with seeded(3):
        random.random()
    assert inside == [noticed, False]
