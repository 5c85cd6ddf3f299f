"""Twenty steps of SGD on batches of sixteen: in one process without a wrapper, and under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Rank
from ddp_equivalence.strategies.emulated_data_parallel import EmulatedDataParallel
from tests.claims.ddp import wrapped
from tests.claims.setting import equal, model_and_batch, mse

STEPS = 20
EFFECTIVE_BATCH = 16
SHOWN = (1, 10, 20)


def dataset() -> TensorDataset:
    """320 examples: rows (320, 5), targets (320, 3), a linear map of the rows."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(STEPS * EFFECTIVE_BATCH, 5, generator=generator, dtype=torch.double)
    rule = torch.randn(5, 3, generator=generator, dtype=torch.double)
    return TensorDataset(rows, rows @ rule)


MakeOptimizer = Callable[..., torch.optim.Optimizer]


def big_batch_training(
    lr: float,
    weight_decay: float = 0.0,
    optimizer: MakeOptimizer = torch.optim.SGD,
    max_norm: float = 0.0,
) -> Tensor:
    """Train in one process, without wrapper or loader.

    Returns the weights before the first step and after each: (STEPS + 1, 18).
    """
    model, *_ = model_and_batch()
    parts = torch.arange(STEPS * EFFECTIVE_BATCH).split(EFFECTIVE_BATCH)
    rows, targets = dataset().tensors
    return _train(
        model,
        [(rows[part], targets[part]) for part in parts],
        optimizer(model.parameters(), lr=lr, weight_decay=weight_decay),
        max_norm=max_norm,
    )


def data_parallel_training(lr: float, gpus: int) -> Tensor:
    """The same training with an emulated nn.DataParallel in one process."""
    model, *_ = model_and_batch()
    return _train(
        EmulatedDataParallel(model, gpus),
        DataLoader(dataset(), EFFECTIVE_BATCH),
        torch.optim.SGD(model.parameters(), lr=lr),
    )


def ddp_training(
    rank: Rank,
    lr: float,
    gpus: int = 1,
    divides: bool = True,
    scale: float = 1.0,
    weight_decay: float = 0.0,
    optimizer: MakeOptimizer = torch.optim.SGD,
    max_norm: float = 0.0,
) -> Tensor:
    """The same training under DDP: every process reads 16 / world size examples a step.

    ``gpus``: how many GPUs each process drives with an emulated nn.DataParallel. ``divides``: DDP
    averages gradients; otherwise it adds them up. ``scale``: a factor on the loss, which is a mean
    over the process's own examples. ``max_norm``: the limit of clipping; 0 for none.
    """
    model, *_ = model_and_batch()
    examples = dataset()
    sampler: Any = DistributedSampler(examples, rank.world_size, rank.rank, shuffle=False)
    ddp = wrapped(EmulatedDataParallel(model, gpus) if gpus > 1 else model, divides)
    trained = _train(
        ddp,
        DataLoader(examples, EFFECTIVE_BATCH // rank.world_size, sampler=sampler),
        optimizer(ddp.parameters(), lr=lr, weight_decay=weight_decay),
        scale,
        max_norm,
    )
    del ddp
    return trained


def same_steps(weights: Tensor, expected: Tensor) -> str:
    """Whether the weights are equal after every step: "yes", or "no" if they differ after each."""
    if equal(weights, expected):
        return "yes"
    apart = (weights - expected)[1:].norm(dim=1) > 1e-4 * expected[1:].norm(dim=1)
    return "no" if bool(apart.all()) else "not after some steps"


def losses(weights: Tensor) -> dict[str, float]:
    """The loss on all 320 examples after some of the steps, by column of the page."""
    model, *_ = model_and_batch()
    columns = {}
    for step in SHOWN:
        nn.utils.vector_to_parameters(weights[step], model.parameters())
        with torch.no_grad():
            name = f"loss after {step} step" + "s" * (step > 1)
            columns[name] = float(mse(model, *dataset().tensors))
    return columns


def flat_weights(model: nn.Module) -> Tensor:
    """A copy of all weights in one row."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _train(
    module: nn.Module,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    scale: float = 1.0,
    max_norm: float = 0.0,
) -> Tensor:
    weights = [flat_weights(module)]
    for rows, targets in loader:
        optimizer.zero_grad()
        (scale * mse(module, rows, targets)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        weights.append(flat_weights(module))
    return torch.stack(weights)
