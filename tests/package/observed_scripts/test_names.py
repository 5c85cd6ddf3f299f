"""Which tensors of a module are recorded, and under which names."""

from __future__ import annotations

import torch
from torch import nn

from ddp_equivalence.observed_scripts.in_script.kept_tensors import named_tensors


class Centers(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.center = torch.zeros(2)


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in named_tensors(module)]


def test_plain_tensors_are_recorded_beside_parameters_and_buffers() -> None:
    assert names(nn.Sequential(Centers())) == [
        "0.count",
        "0.center",
        "0.layer.weight",
        "0.layer.bias",
    ]


def test_a_tensor_that_is_computed_with_a_gradient_is_not_recorded() -> None:
    module = Centers()
    module.center = module.layer(torch.ones(2))
    assert "center" not in names(module)


def test_a_view_that_may_not_be_looked_at_is_not_recorded() -> None:
    """As FSDP makes them: torch raises an error where one asks whether it is a leaf."""
    flat = nn.Parameter(torch.zeros(4)) * 1.0
    module = Centers()
    module.center = flat.split(2)[0]
    flat.mul_(2.0)
    assert "center" not in names(module)
