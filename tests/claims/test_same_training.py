"""The same training on one device, on one machine with DataParallel, and on several machines.

Twenty steps of SGD, batches of 16 from 320 examples, with DataLoader and DistributedSampler;
the weights of every process are compared after every step.
"""

from __future__ import annotations

import torch

from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims.claim import Evidence, Opposite, claim
from tests.claims.setting import CLOSE
from tests.claims.training import (
    big_batch_training,
    data_parallel_training,
    ddp_training,
    losses,
)

LR = 0.01


@claim(
    "false",
    divides=True,
    opposite=Opposite("DDP adds up the processes' gradients without dividing", divides=False),
)
def test_two_machines_train_as_one_with_data_parallel(evidence: Evidence, divides: bool) -> None:
    """DataParallel with batch size 16 on 4 GPUs cannot be reproduced on 2 machines with 2 GPUs each.

    It can, at the same learning rate of 0.01: as one process per machine with batch size 8 or as one
    process per GPU with batch size 4. The effective batch is 16 each time, its 16 examples are the
    same in each step, and so are the gradient and, step by step, the weights. What has to be kept
    is the effective batch, and the learning rate with it. A module that looks across examples, such
    as batch norm, still sees the examples of its GPU only (use SyncBatchNorm under DDP). The
    GPUs inside a process are emulated on the CPU; the processes and DDP between them are real.
    """
    expected = big_batch_training(LR)
    evidence(set_up="1 process, no wrapper", batch_size_per_process=16, lr=LR, **losses(expected))

    alone = data_parallel_training(LR, 4)
    assert torch.allclose(alone, expected, **CLOSE)
    evidence(
        set_up="1 process, 4 GPUs (DataParallel)",
        batch_size_per_process=16,
        lr=LR,
        weights_equal_after_every_step="yes",
        **losses(alone),
    )
    for set_up, batch, layout, gpus in (
        ("2 machines, 1 process each, with 2 GPUs each", 8, "2x1", 2),
        ("2 machines, 2 processes each, with 1 GPU each", 4, "2x2", 1),
    ):
        by_rank = on_ranks(layout, ddp_training, LR, gpus, divides)
        for weights in by_rank:
            assert torch.allclose(weights, expected, **CLOSE)
        evidence(
            set_up=set_up,
            batch_size_per_process=batch,
            lr=LR,
            weights_equal_after_every_step="yes",
            **losses(by_rank[0]),
        )
