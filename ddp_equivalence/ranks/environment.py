"""The names of backends, and the environment variables from which a process group is made."""

from __future__ import annotations

import os

from ddp_equivalence.case.layouts import RankPlace
from ddp_equivalence.ranks.process_state import TF32_OVERRIDE, environment_variables

# The environment variables of a rank: those that torchrun sets, and those of a process group.
#
# Source of torchrun's variables: ``_start_workers`` in
# torch/distributed/elastic/agent/server/local_elastic_agent.py.

LOOPBACK = "127.0.0.1"

RANK_SET_VARIABLE = "DDP_EQUIVALENCE_RANKS"
"""Holds the token of a rank set, on each of its ranks and in every process that these start."""

RERUN_VARIABLE = "DDP_EQUIVALENCE_RERUN"
"""Set on ranks that run a failed case again only to find out more about the failure."""

PROCESS_GROUP_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "NVIDIA_",
    "CUBLAS",  # cuBLAS and cuBLASLt
    "CUDNN_",
    *("HIP_", "HSA_", "ROCR_", "ROCBLAS_", "HIPBLASLT_", "MIOPEN_", "RCCL_"),  # AMD's GPUs
    "OMP_",
    "MKL_",
    "KMP_",
    "UCC_",
    RERUN_VARIABLE,
)
"""Prefixes of variables that are read only once, when a process or its process group starts."""


def process_group_environment() -> tuple[tuple[str, str], ...]:
    """The variables of this process that a process group depends on, as sorted (name, value) pairs.

    Two cases can use the same ranks only if these are equal.
    """
    prefixes = tuple(map(os.fsencode, PROCESS_GROUP_PREFIXES))
    return tuple(
        sorted(
            (os.fsdecode(name), os.fsdecode(value))
            for name, value in environment_variables().items()
            if name.startswith(prefixes)
        )
    )


def torchrun_environment(row: RankPlace, port: int) -> dict[str, str]:
    """The variables (name -> value) that torchrun would set for the rank in ``row``.

    ``port``: the TCP port on which the rendezvous store listens.
    """
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
        # As under torchrun, every rank is a client of a store that already listens.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


DEFAULTS = {
    # Ranks of one host talk over loopback. gloo would hang where the host's own name resolves to
    # another machine.
    "GLOO_SOCKET_IFNAME": "lo",
    # The flight recorder keeps this many collectives as evidence that they ran. Every check reads
    # it, which takes 13 us per collective kept (torch 2.13).
    "TORCH_FR_BUFFER_SIZE": "32",
    # When a collective of NCCL fails or exceeds its timeout, torch's watchdog writes the flight
    # recorder to a file, and sleeps for four times 15 s before it ends the process: longer than
    # the deadline of a case leaves. Every rank reports its last collective itself, so no file is
    # needed, and the watchdog sleeps for 1 s. (Watchdog::runLoop in torch's ProcessGroupNCCL.cpp)
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    # float32 must mean float32: TF32 keeps only 10 bits of the mantissa.
    TF32_OVERRIDE: "0",
    # torchrun sets this, too, unless the user does.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Variables that every rank gets unless the user's environment sets them."""


def nccl_defaults(row: RankPlace, ranks_share_gpus: bool) -> dict[str, str]:
    """More such variables, for the rank in ``row`` on NCCL.

    All ranks are on one host, but NCCL must not see that where nodes are simulated. Ranks with
    another NCCL_HOSTID are on another host for it, so that it does not use NVLink, PCI Express or
    shared memory between them. Then it takes the network, which is the loopback here: NCCL's own
    sockets work on every host, and InfiniBand may not. A user who sets NCCL_HOSTID to any value
    gets one host.

    Where ranks share GPUs, every rank is on a host of its own for NCCL. It refuses two ranks whose
    host and PCI bus id are the same ("Duplicate GPU detected"); otherwise it connects them over the
    network, like ranks on different machines.

    Sources: NVIDIA's documentation of NCCL's environment variables; ``getHostHash`` in utils.cc and
    ``initTransportsRank`` in init.cc of NCCL.
    """
    defaults = {"NCCL_SOCKET_IFNAME": "lo"}
    if ranks_share_gpus:
        defaults |= {"NCCL_HOSTID": f"rank {row.rank}", "NCCL_NET": "Socket"}
    elif row.nodes > 1:
        defaults |= {"NCCL_HOSTID": f"simulated node {row.node}", "NCCL_NET": "Socket"}
    return defaults
