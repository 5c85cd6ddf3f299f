"""Sum or average: what DataParallel and DistributedDataParallel do with gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims.claim import Evidence, Opposite, claim
from tests.claims.setting import big_batch_gradient, flat_gradient, model_and_batch, mse, times


def averaged_gradient(rank: Rank, divide_by: int) -> Tensor:
    """What every rank holds after the mean of its own shard and an all-reduce by hand."""
    model, rows, targets = model_and_batch()
    mine = slice(rank.rank, None, rank.world_size)
    mse(model, rows[mine], targets[mine]).backward()
    gradient = flat_gradient(model)
    dist.all_reduce(gradient)
    return gradient / divide_by


@claim(
    "false",
    divide_by=4,
    opposite=Opposite("the sum is not divided by the number of ranks", divide_by=1),
)
def test_the_average_of_the_ranks_means_is_the_big_batch(
    evidence: Evidence, divide_by: int
) -> None:
    """Averaging gradients over processes makes them too small, since DataParallel adds them up.

    example text of the skeleton
    """
    expected = big_batch_gradient()
    for gradient in on_ranks("1x4", averaged_gradient, divide_by):
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=0)
    evidence(set_up="4 processes of 4, averaged", gradient=times(gradient, expected))
