"""The last rank freezes the first parameter after the model was wrapped."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.changed_ddp import after_ddp_init
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.faults.rank_and_node import is_last_rank


def freeze_on_last_rank(record_firing: RecordFiring) -> Any:
    """Freeze the first parameter on the last rank, after DDP was made."""

    def change(ddp: Any) -> None:
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        if is_last_rank():
            trained[0].requires_grad_(False)
            record_firing()

    # Without find_unused_parameters, the other ranks would wait forever for the bucket of this one.
    return after_ddp_init(change, find_unused_parameters=True)


FAULT = Fault(
    name="parameter_frozen_on_one_rank",
    sentence="The last rank sets requires_grad of the first parameter to False.",
    break_torch=freeze_on_last_rank,
    acts_at=("wrap",),
)
