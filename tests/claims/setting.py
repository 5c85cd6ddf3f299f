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


def equal(found: Tensor, expected: Tensor) -> bool:
    """As near as the same algebra in another order of sums comes in float64, in every element."""
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


def error(gradient: Tensor, expected: Tensor) -> float:
    """The distance to what is expected, over the size of that."""
    return float((gradient - expected).norm() / expected.norm())


def parts_of_gradient(sizes: tuple[int, ...]) -> list[Tensor]:
    """What each part, of consecutive examples, gives to the big batch's gradient."""
    model, rows, targets = model_and_batch()
    parts = []
    for one in torch.arange(sum(sizes)).split(sizes):
        model.zero_grad()
        mse(model, rows[one], targets[one]).backward()
        parts.append(flat_gradient(model) * len(one) / sum(sizes))
    return parts


def weights(gradient: Tensor, parts: list[Tensor]) -> str:
    """How often each part is in the gradient; asserts that there is nothing else."""
    columns = torch.stack(parts, 1)
    found = torch.linalg.lstsq(columns, gradient[:, None]).solution[:, 0]
    assert error(columns @ found, gradient) < 1e-12
    return " and ".join(f"{one:.4g}" for one in found.tolist())
