"""The mistake of the published script, as a case and a step that the suite names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.case import Case
from ddp_equivalence.commands.sandbox.neurons import Neurons, loss
from ddp_equivalence.commands.sandbox.problem import Setup, batches
from ddp_equivalence.ranks import Rank

NEURONS = 199
"""More weights than examples, so that the shares of the examples can be told apart; prime, so that
their number is no other's."""


def case_of(setup: Setup) -> Case:
    """The first step of the sandbox, always with noise.

    Without noise all ranks are given the same, and nobody could tell whether they reduce.
    """
    whole = Setup(
        lr=setup.lr, batch_size=setup.effective_batch, n_experiments=NEURONS, seed=setup.seed
    )

    def neurons() -> nn.Module:
        return Neurons(NEURONS)

    def first_batch(generator: torch.Generator) -> dict[str, Tensor]:
        inputs, targets = next(batches(whole, range(NEURONS)))
        return {"inputs": inputs, "targets": targets}

    return Case(
        model=neurons, batch=first_batch, loss=l1_loss, layout=f"1x{setup.ranks}", seed=setup.seed
    )


def l1_loss(model: nn.Module, batch: Any) -> Tensor:
    """The sandbox's loss of a model on a batch."""
    return loss(model(batch["inputs"]), batch["targets"])


def as_published(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wraps the net, and then calls the bare net: no gradient is ever reduced."""
    ddp = DistributedDataParallel(model)
    l1_loss(model, shard).backward()
    del ddp


def mended(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The same with the wrapper called."""
    ddp = DistributedDataParallel(model)
    l1_loss(ddp, shard).backward()
