"""Several steps of optimizers: ranks beside one process, sums, Adam, clipping, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.claims.attacks.attack import Draw, attack, near
from tests.claims.attacks.gradients import (
    OUTPUTS,
    data,
    equal_sizes,
    loss_of,
    new_model,
)


def trained(
    optimizer: Callable[..., torch.optim.Optimizer],
    sizes: Sequence[int],
    seed: int,
    *,
    factor: float | Tensor = 1.0,
    max_norm: float = 0.0,
    clip_first: bool = False,
    steps: int = 5,
    ranks: bool = True,
) -> Tensor:
    """The way of the weights over some steps. ``ranks``: the average of the means of each size
    times ``factor``; otherwise the mean of all.
    """
    model = new_model(seed)
    begin = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    made = optimizer(model.parameters())
    for step in range(steps):
        rows, targets = data(sum(sizes), seed + 10 * step + 10)
        first, parts = 0, []
        for size in sizes if ranks else [sum(sizes)]:
            part = slice(first, first + size)
            first += size
            value = loss_of(model(rows[part]), targets[part], "mse")
            parts.append(torch.autograd.grad(value, [*model.parameters()]))
            if clip_first:
                parts[-1] = clipped(parts[-1], max_norm)
        for number, parameter in enumerate(model.parameters()):
            average = torch.stack([one[number] for one in parts]).mean(0)
            by_output = torch.as_tensor(factor).reshape(-1, *[1] * (average.ndim - 1))
            parameter.grad = by_output * average
        if max_norm and not clip_first:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - begin


def clipped(gradients: tuple[Tensor, ...], max_norm: float) -> tuple[Tensor, ...]:
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    return tuple(one * min(1.0, max_norm / float(norm)) for one in gradients)


def any_optimizer(draw: Draw) -> Any:
    lr, decay = 10 ** draw.uniform(-3, -1), draw.choice([0.0, 0.1])
    return draw.choice(
        [
            partial(SGD, lr=lr, momentum=draw.choice([0.0, 0.9]), weight_decay=decay),
            partial(Adam, lr=lr, eps=1e-3, weight_decay=decay),
            partial(torch.optim.AdamW, lr=lr, eps=1e-3, weight_decay=decay),
            partial(torch.optim.RMSprop, lr=lr, eps=1e-3, weight_decay=decay),
        ]
    )


def a_training(draw: Draw) -> dict[str, Any]:
    given = equal_sizes(draw)
    return {
        "sizes": given["sizes"],
        "seed": given["seed"],
        "optimizer": any_optimizer(draw),
        "max_norm": draw.choice([0.0, 10 ** draw.uniform(-2, 1)]),
    }


@attack(
    "two_machines_train_as_one_with_data_parallel",
    "half_the_batch_per_process_keeps_the_learning_rate",
    "clipping_is_that_of_the_big_batch",
    draw=a_training,
    outside=[
        {"sizes": [1, 6], "seed": 1, "optimizer": partial(SGD, lr=0.1)},
        {
            "sizes": [3, 3],
            "seed": 1,
            "optimizer": partial(SGD, lr=0.1),
            "max_norm": 0.3,
            "clip_first": True,
        },
    ],
)
def ranks_train_as_one(
    sizes: list[int], seed: int, optimizer: Any, max_norm: float = 0.0, clip_first: bool = False
) -> bool:
    mine = trained(optimizer, sizes, seed, max_norm=max_norm, clip_first=clip_first)
    return near(mine, trained(optimizer, sizes, seed, max_norm=max_norm, ranks=False), 1e-7)


def two_ranks(draw: Draw) -> dict[str, Any]:
    return {"optimizer": any_optimizer(draw), "seed": draw.randrange(10**6)}


@attack(
    "optimizers_with_a_state_train_like_the_big_batch",
    "ddp_keeps_ranks_alike_that_go_on_from_a_checkpoint",
    draw=two_ranks,
    outside=[
        {"optimizer": partial(SGD, lr=0.1, momentum=0.9), "seed": 1, "state_on": (0,)},
        {"optimizer": partial(Adam, lr=0.1), "seed": 1, "state_on": (0,)},
        {"optimizer": partial(SGD, lr=0.1), "seed": 1, "weights_on": (0,)},
    ],
)
def two_ranks_stay_alike_after_a_checkpoint(
    optimizer: Any,
    seed: int,
    state_on: tuple[int, ...] = (0, 1),
    weights_on: tuple[int, ...] = (0, 1),
) -> bool:
    """Each rank has its own model and optimizer, loads a checkpoint, and takes averaged steps."""
    old = new_model(seed + 1)
    before = optimizer(old.parameters())
    loss_of(old(data(4, seed)[0]), data(4, seed)[1], "mse").backward()
    before.step()
    models = [new_model(seed) for _ in range(2)]
    optimizers = [optimizer(model.parameters()) for model in models]
    for rank in weights_on:
        models[rank].load_state_dict(old.state_dict())
    for rank in state_on:
        optimizers[rank].load_state_dict(deepcopy(before.state_dict()))  # as from a file
    for step in range(3):
        rows, targets = data(4, seed + step)
        for rank, model in enumerate(models):
            part = slice(2 * rank, 2 * rank + 2)
            model.zero_grad()
            loss_of(model(rows[part]), targets[part], "mse").backward()
        for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert first.grad is not None
            assert second.grad is not None
            average = (first.grad + second.grad) / 2
            first.grad, second.grad = average.clone(), average.clone()
        for one in optimizers:
            one.step()
    ends = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    return torch.equal(*ends)


def summed_under_sgd(draw: Draw) -> dict[str, Any]:
    given = equal_sizes(draw)
    return {"sizes": given["sizes"], "seed": given["seed"], "lr": 10 ** draw.uniform(-3, -1)}


@attack(
    "a_sum_over_processes_needs_the_learning_rate_divided",
    draw=summed_under_sgd,
    outside=[
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "optimizer": Adam},
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "more": {"weight_decay": 0.5}},
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "max_norm": 0.1},
        {"sizes": [1, 6], "seed": 1, "lr": 0.05},
    ],
)
def a_divided_rate_makes_up_for_a_sum(
    sizes: list[int],
    seed: int,
    lr: float,
    optimizer: Any = SGD,
    more: dict[str, float] | None = None,
    max_norm: float = 0.0,
) -> bool:
    world = len(sizes)
    divided, kept = (partial(optimizer, lr=rate, **more or {}) for rate in (lr / world, lr))
    mine = trained(divided, sizes, seed, factor=world, max_norm=max_norm)
    return near(mine, trained(kept, sizes, seed, max_norm=max_norm, ranks=False), 1e-7)


@attack(
    "a_quarter_of_the_rate_on_four_processes_is_too_small",
    draw=summed_under_sgd,
    outside=[{"sizes": [4, 4], "seed": 1, "lr": 0.05, "factor": 2.0}],
)
def a_divided_rate_is_too_small_for_an_average(
    sizes: list[int], seed: int, lr: float, factor: float = 1.0
) -> bool:
    first = partial(trained, sizes=sizes, seed=seed, steps=1)
    mine = first(partial(SGD, lr=lr / len(sizes)), factor=factor)
    return near(mine, first(partial(SGD, lr=lr), ranks=False) / len(sizes), 1e-7)


def a_factor(draw: Draw) -> dict[str, Any]:
    given = summed_under_sgd(draw)
    decay = draw.choice([0.0, 0.1])
    adam = partial(torch.optim.AdamW, weight_decay=decay) if decay else Adam
    factors = torch.tensor([10 ** draw.uniform(-2, 2) for _ in range(OUTPUTS)], dtype=torch.double)
    return given | {"factor": factors, "optimizer": partial(adam, eps=1e-14)}


@attack(
    "adam_hides_a_constant_factor",
    "adam_does_not_hide_everything",
    draw=a_factor,
    outside=[
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "factor": 4.0, "optimizer": SGD},
        {
            "sizes": [4, 4],
            "seed": 1,
            "lr": 0.05,
            "factor": 4.0,
            "optimizer": partial(Adam, weight_decay=0.5),
        },
        {"sizes": [1, 6], "seed": 1, "lr": 0.05, "factor": 1.0, "optimizer": Adam},
    ],
)
def adam_cancels_a_factor(
    sizes: list[int], seed: int, lr: float, factor: Any, optimizer: Any
) -> bool:
    """``factor``: one number, or one for each output of the model."""
    made = partial(optimizer, lr=lr)
    mine = trained(made, sizes, seed, factor=factor)
    return near(mine, trained(made, sizes, seed, ranks=False), 1e-6)
