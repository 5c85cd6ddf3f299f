"""Twenty steps of SGD on batches of sixteen: in one process without a wrapper, and by DDP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Rank
from tests.claims.data_parallel import DataParallelRule
from tests.claims.ddp import wrapped
from tests.claims.setting import equal, model_and_batch, mse

STEPS = 20
EFFECTIVE_BATCH = 16
SHOWN = (1, 10, 20)


def dataset() -> TensorDataset:
    """320 examples: rows (320, 5), targets (320, 3), which follow from the rows."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(STEPS * EFFECTIVE_BATCH, 5, generator=generator, dtype=torch.double)
    rule = torch.randn(5, 3, generator=generator, dtype=torch.double)
    return TensorDataset(rows, rows @ rule)


def big_batch_training(lr: float, weight_decay: float = 0.0) -> Tensor:
    """One process, no wrapper, no loader. Weights before and after each step: (STEPS + 1, 18)."""
    model, *_ = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    rows, targets = dataset().tensors
    weights = [flat_weights(model)]
    for part in torch.arange(len(rows)).split(EFFECTIVE_BATCH):
        optimizer.zero_grad()
        mse(model, rows[part], targets[part]).backward()
        optimizer.step()
        weights.append(flat_weights(model))
    return torch.stack(weights)


def data_parallel_training(lr: float, gpus: int) -> Tensor:
    """The same with nn.DataParallel's rule in one process."""
    model, *_ = model_and_batch()
    return _train(
        DataParallelRule(model, gpus),
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
) -> Tensor:
    """The same by DDP: every process reads 16 / world size examples a step by its sampler.

    ``gpus``: driven by each process, by nn.DataParallel's rule. ``divides``: else gradients add up.
    ``scale``: of the loss, which is a mean over the process' own examples.
    """
    model, *_ = model_and_batch()
    examples = dataset()
    sampler: Any = DistributedSampler(examples, rank.world_size, rank.rank, shuffle=False)
    ddp = wrapped(DataParallelRule(model, gpus) if gpus > 1 else model, divides)
    trained = _train(
        ddp,
        DataLoader(examples, EFFECTIVE_BATCH // rank.world_size, sampler=sampler),
        torch.optim.SGD(ddp.parameters(), lr=lr, weight_decay=weight_decay),
        scale,
    )
    del ddp
    return trained


def same_steps(weights: Tensor, expected: Tensor) -> str:
    """Whether all weights are equal after every step: "yes", or "no" if they differ after each."""
    if equal(weights, expected):
        return "yes"
    apart = (weights - expected)[1:].norm(dim=1) > 1e-4 * expected[1:].norm(dim=1)
    return "no" if bool(apart.all()) else "not after some steps"


def losses(weights: Tensor) -> dict[str, float]:
    """Columns for the page: the loss on all 320 examples after some of the steps."""
    model, *_ = model_and_batch()
    found = {}
    for step in SHOWN:
        nn.utils.vector_to_parameters(weights[step], model.parameters())
        with torch.no_grad():
            name = f"loss after {step} step" + "s" * (step > 1)
            found[name] = float(mse(model, *dataset().tensors))
    return found


def flat_weights(model: nn.Module) -> Tensor:
    """A copy of all weights in one row."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _train(
    module: nn.Module, loader: Iterable[Any], optimizer: torch.optim.Optimizer, scale: float = 1.0
) -> Tensor:
    weights = [flat_weights(module)]
    for rows, targets in loader:
        optimizer.zero_grad()
        (scale * mse(module, rows, targets)).backward()
        optimizer.step()
        weights.append(flat_weights(module))
    return torch.stack(weights)
