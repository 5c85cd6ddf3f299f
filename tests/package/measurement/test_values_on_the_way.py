"""What a watched run keeps of modules and gradients is small, whatever the model."""

from __future__ import annotations

import torch
from torch import nn

from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.measurement.calls import thinned, unpacked
from ddp_equivalence.measurement.gradient_watch import (
    MOST,
    MOST_OF_A_STATE,
    GradientWatch,
    StateLog,
)
from ddp_equivalence.measurement.observation import MOST_CALLS, ModuleWatch


def test_a_sample_visits_all_columns() -> None:
    columns = thinned(torch.arange(100 * 64), 64) % 64
    assert len(set(columns.tolist())) > 32


def test_a_state_of_a_large_model_keeps_few_elements() -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(20)))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    log = StateLog(GradientWatch(model, ElementSample.at_most(100_000, sizes)))
    log.note(0, tuple(sizes))
    kept = [len(unpacked(values)) for values in log.states[0].values.values()]
    assert max(kept) <= MOST
    assert sum(kept) <= MOST_OF_A_STATE


def test_calls_beyond_the_most_are_counted_as_left_out() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    watch = ModuleWatch(model, lambda: (0, 0, False))
    with watch.watching():
        for _ in range(MOST_CALLS):
            model(torch.ones(1, 1))
    assert len(watch.calls) <= MOST_CALLS + 1
    assert not watch.complete
