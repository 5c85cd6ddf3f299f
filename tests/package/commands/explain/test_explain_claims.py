"""Torch does what the text says about samplers, Adam, weight decay and clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_equivalence.commands.explain import Setup, explain

FACTOR = 4.0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("examples", [5, 16, 17, 18, 23, 40])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 3), (2, 2), (3, 1), (4, 2)])
def test_an_epoch_has_the_steps_that_sampler_and_loader_give(
    examples: int, ranks: int, batch: int, drop_last: bool
) -> None:
    setup = Setup(batch=batch, ranks_per_node=ranks, examples=examples, drop_last=drop_last)
    epoch = explain(setup).epoch
    assert epoch is not None
    dataset = list(range(examples))
    seen: list[int] = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(dataset, ranks, rank)  # type: ignore[arg-type]
        loader: Any = DataLoader(dataset, batch, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]
        batches = [one.tolist() for one in loader]
        assert len(sampler) == epoch.examples_each
        assert len(batches) == epoch.micro_batches == epoch.steps
        assert len(batches[-1]) == epoch.last_batch
        seen += [example for one in batches for example in one]
    assert len(seen) - len(set(seen)) == epoch.repeated
    assert examples - len(set(seen)) == epoch.dropped


@pytest.mark.parametrize(
    ("examples", "full", "rest"), [(24, 2, 0), (25, 2, 1), (28, 2, 1), (40, 3, 1)]
)
def test_steps_of_an_epoch_with_accumulation(examples: int, full: int, rest: int) -> None:
    setup = Setup(
        batch=2,
        ranks_per_node=2,
        accumulation=3,
        accumulation_divided=True,
        examples=examples,
    )
    epoch = explain(setup).epoch
    assert epoch is not None
    assert (epoch.full_steps, epoch.rest, epoch.steps) == (full, rest, full + bool(rest))


def trained(make: Callable[..., torch.optim.Optimizer], factor: float, max_norm: float) -> Tensor:
    """Weights, shape (elements,), after five steps on a loss multiplied by ``factor``."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = make(model.parameters())
    for step in range(5):
        rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        (factor * model(rows).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.1, eps=1e-3, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.1, eps=1e-3, weight_decay=0.01)


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        (SGD, partial(SGD, lr=0.1 / FACTOR, weight_decay=0.01 * FACTOR)),
        (ADAM, partial(ADAM, eps=1e-3 * FACTOR, weight_decay=0.01 * FACTOR)),
        (ADAMW, partial(ADAMW, eps=1e-3 * FACTOR)),
    ],
)
@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_a_factor_is_made_good_by_the_settings_that_the_text_names(
    plain: Callable[..., torch.optim.Optimizer],
    changed: Callable[..., torch.optim.Optimizer],
    max_norm: float,
) -> None:
    right = trained(plain, 1.0, max_norm)
    # The tolerance is for clip_grad_norm_, which adds 1e-6 to the norm.
    same = trained(changed, FACTOR, max_norm * FACTOR)
    torch.testing.assert_close(same, right, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(trained(plain, FACTOR, max_norm * FACTOR), right, rtol=1e-3)
    assert not torch.allclose(trained(changed, FACTOR, 0.05), right, rtol=1e-3)
