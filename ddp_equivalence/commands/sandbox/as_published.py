"""The mistake of the published script, as a case and a step that the suite can name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.case import Case
from ddp_equivalence.commands.sandbox.neurons import Neurons, loss
from ddp_equivalence.commands.sandbox.problem import Problem, batches
from ddp_equivalence.ranks import Rank

NEURONS = 199
"""The number of weights. There are more weights than examples, so that the shares of the examples
can be told apart. It is a prime, so that no other count in the report equals it."""


def case_of(problem: Problem) -> Case:
    """The first step of the sandbox, always with noise.

    Without noise all ranks get the same examples, and nothing shows whether they reduce.
    """
    whole = Problem(
        lr=problem.lr,
        batch_size=problem.effective_batch,
        n_experiments=NEURONS,
        seed=problem.seed,
    )

    def neurons() -> nn.Module:
        return Neurons(NEURONS)

    def first_batch(generator: torch.Generator) -> dict[str, Tensor]:
        inputs, targets = next(batches(whole, range(NEURONS)))
        return {"inputs": inputs, "targets": targets}

    return Case(
        model=neurons,
        batch=first_batch,
        loss=l1_loss,
        layout=f"1x{problem.ranks}",
        seed=problem.seed,
    )


def l1_loss(model: nn.Module, batch: Any) -> Tensor:
    """The sandbox's loss of a model on a batch."""
    return loss(model(batch["inputs"]), batch["targets"])


def as_published(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wraps the net in DDP but calls the bare net, so that no gradient is ever reduced."""
    ddp = DistributedDataParallel(model)
    l1_loss(model, shard).backward()
    del ddp


def mended(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wraps the net in DDP and calls the wrapper."""
    ddp = DistributedDataParallel(model)
    l1_loss(ddp, shard).backward()
