"""The last rank freezes the first parameter after the model was wrapped."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import after_making
from ddp_equivalence.faults.nodes import last_rank


def frozen(fire: Fire) -> Any:
    """Freeze the first parameter on the last rank."""

    def change(ddp: Any) -> None:
        trained = [one for one in ddp.module.parameters() if one.requires_grad]
        if last_rank():
            trained[0].requires_grad_(False)
            fire()

    # Without that, the other ranks would wait for its bucket for ever.
    return after_making(change, find_unused_parameters=True)


FAULT = Fault(
    name="parameter_frozen_on_one_rank",
    sentence="The last rank sets requires_grad of the first parameter to False.",
    in_torch=frozen,
)
