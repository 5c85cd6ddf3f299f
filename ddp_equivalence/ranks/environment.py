"""The environment variables of ranks: those of torchrun, and those that shape a process group.

Source of the first: torch/distributed/elastic/agent/server/local_elastic_agent.py,
``_start_workers``.
"""

from __future__ import annotations

import os

from ddp_equivalence.case.layouts import RankPlace

LOOPBACK = "127.0.0.1"

OF_SET = "DDP_EQUIVALENCE_RANKS"
"""Marks every rank of one set, and all that such a rank starts."""

SECOND_LOOK = "DDP_EQUIVALENCE_SECOND_LOOK"
"""Set on ranks whose only purpose is to find out more."""

OF_GROUPS = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "KMP_",
    "UCC_",
    SECOND_LOOK,
)
"""Beginnings of the names of variables that are read once, when a process or its group begins."""


def group_environment() -> tuple[tuple[str, str], ...]:
    """The variables of this process that a process group depends on: ranks are shared if equal."""
    return tuple(
        sorted((name, value) for name, value in os.environ.items() if name.startswith(OF_GROUPS))
    )


def torchrun_environment(row: RankPlace, port: int) -> dict[str, str]:
    """Name -> value for the rank in ``row``; ``port`` is where the rendezvous store listens."""
    return {
        "LOCAL_RANK": str(row.local_rank),
        "RANK": str(row.rank),
        "GROUP_RANK": str(row.node),
        "ROLE_RANK": str(row.rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(row.local_world_size),
        "WORLD_SIZE": str(row.world_size),
        "GROUP_WORLD_SIZE": str(row.nodes),
        "ROLE_WORLD_SIZE": str(row.world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "ddp_equivalence",
        # Every rank is a client of the store that is already there, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


DEFAULTS = {
    # Ranks of one host talk over loopback; a host name that resolves elsewhere would hang gloo.
    "GLOO_SOCKET_IFNAME": "lo",
    # The flight recorder remembers the last collectives: evidence that they ran. Reading it
    # costs 13 us for each that it holds, in every check.
    "TORCH_FR_BUFFER_SIZE": "32",
    # float32 means float32: TF32 keeps 10 bits of the mantissa.
    "NVIDIA_TF32_OVERRIDE": "0",
}
"""Set on every rank unless the user's environment says otherwise."""
