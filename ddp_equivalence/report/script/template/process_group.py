"""Start a rank under torchrun, on a simulated node."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.template.placeholders import BACKEND, NODE_OF_RANK


def join_process_group() -> Rank:
    """Join, on a node that is simulated on this host and sees its own GPUs if there are enough."""
    rank, world_size, nodes = int(os.environ["RANK"]), len(NODE_OF_RANK), len(set(NODE_OF_RANK))
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise SystemExit(f"this script needs --nproc-per-node {world_size}")
    node = NODE_OF_RANK[rank]
    ranks_of_node = [other for other in range(world_size) if NODE_OF_RANK[other] == node]
    local_rank, gpus = ranks_of_node.index(rank), torch.cuda.device_count()
    backend = BACKEND or (("nccl" if gpus >= world_size else "nccl_shared") if gpus else "gloo")
    if gpus < (needed := {"gloo": 0, "gloo_cuda": 1, "nccl_shared": 1}.get(backend, world_size)):
        raise SystemExit(f"this script runs on {backend} and needs {needed} GPUs, found {gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    if backend == "gloo":
        visible = ""
    elif world_size > 1:
        visible = ",".join(dict.fromkeys(visible.split(",")[r % gpus] for r in ranks_of_node))
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": visible,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(ranks_of_node)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
    }
    if backend == "nccl_shared":  # NCCL lets ranks share a GPU that say they are on other hosts
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if visible:
        device = torch.device("cuda", local_rank % len(visible.split(",")))
        torch.cuda.set_device(device)
    backend = backend.removesuffix("_cuda").removesuffix("_shared")
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    return Rank(rank, world_size, local_rank, len(ranks_of_node), node, nodes, device, backend)
