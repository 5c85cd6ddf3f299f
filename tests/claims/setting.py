"""The small model and the sixteen examples of the claims about gradients; in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence.comparison.digits import text_of

EXAMPLES = 16


def model_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, rows (16, 5) and targets (16, 3), the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(5, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
    rows = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.double)
    return model, rows, torch.randn(EXAMPLES, 3, generator=generator, dtype=torch.double)


def mse(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error over rows and outputs."""
    return nn.functional.mse_loss(model(rows), targets)


def big_batch_gradient() -> Tensor:
    """The gradient of all sixteen examples in one forward and backward of one process, (18,)."""
    model, rows, targets = model_and_batch()
    mse(model, rows, targets).backward()
    return flat_gradient(model)


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def times(gradient: Tensor, expected: Tensor) -> str:
    """The gradient as a multiple of the expected one, g: "4 g", or "no multiple of g (...)"."""
    factor = float(gradient @ expected / (expected @ expected))
    rest = float((gradient - factor * expected).norm() / expected.norm())
    if rest < 1e-9:
        return f"{text_of(factor, '.4g')} g"
    return f"no multiple of g ({text_of(rest, '.2g')} of it unexplained)"


def equal(gradient: Tensor, expected: Tensor) -> bool:
    """Whether all elements are equal, except for float64 rounding of sums in another order."""
    return torch.allclose(gradient, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


def error(gradient: Tensor, expected: Tensor) -> float:
    """The distance to the expected gradient, relative to its size."""
    return float((gradient - expected).norm() / expected.norm())


def parts_of_gradient(sizes: tuple[int, ...]) -> list[Tensor]:
    """The contribution of each part of consecutive examples to the big batch's gradient."""
    model, rows, targets = model_and_batch()
    parts = []
    for part in torch.arange(sum(sizes)).split(sizes):
        model.zero_grad()
        mse(model, rows[part], targets[part]).backward()
        parts.append(flat_gradient(model) * len(part) / sum(sizes))
    return parts


def weights(gradient: Tensor, parts: list[Tensor]) -> str:
    """How often the gradient contains each part; asserts that it contains nothing else."""
    columns = torch.stack(parts, 1)
    solution = torch.linalg.lstsq(columns, gradient[:, None]).solution[:, 0]
    assert error(columns @ solution, gradient) < 1e-12
    return " and ".join(text_of(weight, ".4g") for weight in solution.tolist())
