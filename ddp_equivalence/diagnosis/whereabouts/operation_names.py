"""The names by which users know the operations of torch."""

from __future__ import annotations

from ddp_equivalence.measurement.operations import Operation

NAMES = {
    "lift_fresh": "tensor",
    "_to_copy": "to",
    "addmm": "linear",
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
}
"""What users call operations that torch has other names for."""


def called(operation: Operation) -> str:
    """What a user calls this operation."""
    return NAMES.get(operation.name, operation.name.strip("_").removesuffix("_forward"))
