"""Learning rates at another batch: the way of one weight, and the noise of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.claims.attacks.attack import Draw, attack


def way(
    optimizer: Callable[..., torch.optim.Optimizer], steps: int, slope: Callable[[Tensor], Tensor]
) -> float:
    weight = nn.Parameter(torch.ones((), dtype=torch.double))
    made = optimizer([weight])
    for _ in range(steps):
        weight.grad = slope(weight.detach())
        made.step()
    return 1 - float(weight.detach())


def scaled(draw: Draw) -> dict[str, Any]:
    return {
        "k": draw.randint(2, 16),
        "steps": draw.randint(1, 50),
        "lr": 10 ** draw.uniform(-5, -2),
        "size": 10 ** draw.uniform(-2, 2),
        "drift": draw.uniform(-1e-6, 1e-6),
    }


@attack(
    "linear_scaling_reaches_the_same_weight",
    draw=scaled,
    outside=[
        {"k": 4, "steps": 4, "lr": 1e-3, "size": 1.0, "momentum": 0.9},
        {"k": 4, "steps": 500, "lr": 1e-2, "size": 1.0, "drift": 0.01},
    ],
)
def linear_scaling_goes_as_far(
    k: int, steps: int, lr: float, size: float, drift: float = 0.0, momentum: float = 0.0
) -> bool:
    """``drift``: by how much of itself the gradient changes from one small step to the next."""
    small = way(partial(SGD, lr=lr, momentum=momentum), k * steps, drifting(size, drift))
    large = way(partial(SGD, lr=k * lr, momentum=momentum), steps, drifting(size, k * drift))
    return math.isclose(small, large, rel_tol=1e-3)


def drifting(size: float, drift: float, first: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A gradient that changes by this part of itself in every step.

    ``first``: by what the first one is multiplied.
    """
    steps = count()

    def gradient(weight: Tensor) -> Tensor:
        step = next(steps)
        return torch.full_like(weight, size * (1 + drift) ** step * (1.0 if step else first))

    return gradient


@attack(
    "linear_scaling_reaches_the_same_weight",
    draw=lambda draw: {"steps": draw.randint(1000, 2000), "momentum": draw.uniform(0, 0.9)},
    outside=[{"steps": 4, "momentum": 0.9}],
)
def long_training_with_momentum(steps: int, momentum: float) -> bool:
    def far(lr: float, steps: int) -> float:
        moved = velocity = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1
            moved += lr * velocity
        return moved

    return math.isclose(far(1e-6, 4 * steps), far(4e-6, steps), rel_tol=0.01)


def curved(draw: Draw) -> dict[str, Any]:
    """With 1.5 x steps x (rate x curvature)^2 below 0.005."""
    steps, curvature = 4 * draw.randint(1, 500), draw.choice([-1, 1]) * 10 ** draw.uniform(-2, 2)
    return {
        "lr": math.sqrt(draw.uniform(0, 0.005) / (1.5 * steps)) / abs(curvature),
        "curvature": curvature,
        "steps": steps,
    }


@attack(
    "linear_scaling_is_approximate_where_the_gradient_changes",
    draw=curved,
    outside=[
        {"lr": 0.1, "curvature": 1.0, "steps": 64},
        {"lr": 0.6, "curvature": 1.0, "steps": 64},
        {"lr": 0.01, "curvature": -1.0, "steps": 2000},
        {"lr": 0.001, "curvature": 1.0, "steps": 160, "optimizer": partial(SGD, momentum=0.9)},
        {"lr": 0.01, "curvature": 1.0, "steps": 200, "optimizer": Adam},
    ],
)
def linear_scaling_where_the_gradient_is_the_weight(
    lr: float, curvature: float, steps: int, optimizer: Any = SGD
) -> bool:
    """Within a hundredth. A negative curvature: the weight goes away from a saddle."""
    small = way(partial(optimizer, lr=lr), steps, lambda weight: curvature * weight)
    large = way(partial(optimizer, lr=4 * lr), steps // 4, lambda weight: curvature * weight)
    return math.isclose(1 - small, 1 - large, rel_tol=0.01)


@attack(
    "adams_step_is_not_always_as_long_as_the_learning_rate",
    "linear_scaling_with_adam",
    draw=scaled,
    outside=[
        {"k": 4, "steps": 50, "lr": 1e-3, "size": 1.0, "drift": -0.05},
        {"k": 4, "steps": 50, "lr": 1e-3, "size": 1e-9},
        {"k": 4, "steps": 50, "lr": 1e-3, "size": 1.0, "first": 1000.0},
    ],
)
def adams_step_is_the_rate(
    k: int, steps: int, lr: float, size: float, drift: float = 0.0, first: float = 1.0
) -> bool:
    """``first``: by what the first gradient is multiplied."""
    small = way(partial(Adam, lr=lr), k * steps, drifting(size, drift, first))
    large = way(partial(Adam, lr=k * lr), steps, drifting(size, k * drift, first))
    straight = math.isclose(small, k * steps * lr, rel_tol=1e-3)
    return straight and math.isclose(small, large, rel_tol=1e-3)


def noisy(draw: Draw) -> dict[str, Any]:
    return {"k": draw.choice([4, 9, 16]), "seed": draw.randrange(10**6)}


@attack(
    "square_root_scaling_keeps_the_variance_of_a_step",
    "more_epochs_are_needed_unless_the_rate_grows_as_much",
    draw=noisy,
    outside=[{"k": 4, "seed": 1, "power": 1.0}, {"k": 4, "seed": 1, "power": 0.0}],
)
def the_root_keeps_the_variance(k: int, seed: int, power: float = 0.5) -> bool:
    """The update is rate x mean of a batch: its variance, and the way of the root of k epochs."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randn(4000, 4, generator=generator, dtype=torch.double).mean(1)
    large = torch.randn(4000, 4 * k, generator=generator, dtype=torch.double).mean(1) * k**power
    same = math.isclose(float(large.var() / small.var()), 1, rel_tol=0.2)
    one_epoch = way(partial(SGD, lr=1e-4), 144, torch.ones_like)
    root = math.isqrt(k)
    epochs = way(partial(SGD, lr=1e-4 * k**power), root * 144 // k, torch.ones_like)
    return same and math.isclose(one_epoch, epochs, rel_tol=1e-6)


@attack(
    "more_processes_make_no_larger_updates",
    draw=noisy,
    outside=[{"k": 4, "seed": 1, "rate": 4.0}],
)
def a_larger_batch_at_the_same_rate(k: int, seed: int, rate: float = 1.0) -> bool:
    """The mean update is as long, and its deviation the root of k times smaller."""
    generator = torch.Generator().manual_seed(seed)
    small = 1 + torch.randn(8000, 4, generator=generator, dtype=torch.double).mean(1)
    large = 1 + torch.randn(8000, 4 * k, generator=generator, dtype=torch.double).mean(1)
    as_long = math.isclose(float(rate * large.mean() / small.mean()), 1, rel_tol=0.05)
    return as_long and math.isclose(float(small.std() / large.std()), k**0.5, rel_tol=0.1)
