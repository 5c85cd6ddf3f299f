"""A script that is to compute in float64 is told early if its model does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from ddp_equivalence.observed_scripts.in_script.hooks import BYTES_PER_ELEMENT, require_memory


@pytest.fixture
def room_for_100(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has room for 100 parameters on each of two ranks."""
    register = nn.Module.register_parameter
    monkeypatch.setattr("torch.nn.Module.register_parameter", register)  # is put back
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    available = SimpleNamespace(available=2 * 100 * BYTES_PER_ELEMENT)
    monkeypatch.setattr("psutil.virtual_memory", lambda: available)
    require_memory()


@pytest.mark.usefixtures("room_for_100")
def test_parameters_that_do_not_fit_into_the_memory_are_refused() -> None:
    nn.Linear(10, 10, bias=False)
    with pytest.raises(MemoryError, match="101 parameters do not fit into the memory in float64"):
        nn.Linear(1, 1, bias=False)


@pytest.mark.usefixtures("room_for_100")
def test_parameters_of_another_device_need_no_room() -> None:
    nn.Linear(1000, 1000, device="meta")
    assert nn.Linear(10, 10, bias=False).weight.numel() == 100
