"""The small model and the sixteen examples that the claims about gradients share. float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXAMPLES = 16


def model_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    """The same on every rank: a model, rows (16, 5) and targets (16, 3)."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(5, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
    rows = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.double)
    return model, rows, torch.randn(EXAMPLES, 3, generator=generator, dtype=torch.double)


def mse(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    """A mean over rows and outputs."""
    return nn.functional.mse_loss(model(rows), targets)


def big_batch_gradient() -> Tensor:
    """One forward, one backward, all sixteen examples, one process. Shape (18,)."""
    model, rows, targets = model_and_batch()
    mse(model, rows, targets).backward()
    return flat_gradient(model)


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def times(gradient: Tensor, expected: Tensor) -> str:
    """How many times the expected gradient this is, as "4.00 g"; "no multiple of g" if none."""
    factor = float(gradient @ expected / (expected @ expected))
    rest = float((gradient - factor * expected).norm() / expected.norm())
    return f"{factor:.4g} g" if rest < 1e-9 else f"no multiple of g ({rest:.2g} of it unexplained)"
