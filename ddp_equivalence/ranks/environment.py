"""The environment variables that torchrun would set on every rank of a layout.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, ``_start_workers``.
"""

from __future__ import annotations

from ddp_equivalence.layouts import Row

LOOPBACK = "127.0.0.1"


def torchrun_environment(row: Row, port: int) -> dict[str, str]:
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
    # The flight recorder remembers the last collectives: evidence that they ran.
    "TORCH_FR_BUFFER_SIZE": "256",
    # float32 means float32: TF32 keeps 10 bits of the mantissa.
    "NVIDIA_TF32_OVERRIDE": "0",
}
"""Set on every rank unless the user's environment says otherwise."""
