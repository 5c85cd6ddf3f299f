"""``torch.distributed.all_reduce`` of a gradient is called once more by every call."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ddp_equivalence.faults.changed_sums import after_each_sum
from ddp_equivalence.faults.fault import Fault, RecordFiring


def reduce_twice(record_firing: RecordFiring) -> AbstractContextManager[None]:
    """``dist.all_reduce`` adds gradients up, and then adds up the sums."""
    return after_each_sum(record_firing, lambda sum_again, tensor: sum_again())


FAULT = Fault(
    name="reduced_more_than_once",
    sentence="torch.distributed.all_reduce adds gradients up over the ranks twice.",
    break_torch=reduce_twice,
    strategies=("manual_all_reduce_mean",),
    own_step="by_hand",
    acts_at=("all_reduce",),
)
