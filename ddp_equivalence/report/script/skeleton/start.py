"""How a rank comes to life under torchrun, on a simulated node."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.skeleton.placeholders import BACKEND, NODE_OF_RANK


def start() -> Rank:
    """Join the process group; nodes are simulated on this host, each with GPUs of its own."""
    rank, world_size, nodes = int(os.environ["RANK"]), len(NODE_OF_RANK), len(set(NODE_OF_RANK))
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise SystemExit(f"this needs --nproc-per-node {world_size}")
    node = NODE_OF_RANK[rank]
    on_node = [other for other in range(world_size) if NODE_OF_RANK[other] == node]
    local_rank, gpus = on_node.index(rank), torch.cuda.device_count()
    backend = BACKEND or ("nccl" if gpus >= world_size else "gloo")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    if backend == "gloo":
        seen = ""
    elif world_size > 1:
        seen = ",".join(dict.fromkeys(seen.split(",")[other % gpus] for other in on_node))
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": seen,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(on_node)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if seen:
        device = torch.device("cuda", local_rank % len(seen.split(",")))
        torch.cuda.set_device(device)
    backend = backend.removesuffix("_cuda")
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    return Rank(rank, world_size, local_rank, len(on_node), node, nodes, device, backend)
