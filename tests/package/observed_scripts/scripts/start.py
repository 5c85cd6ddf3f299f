"""Starts the ranks of the scripts in this folder. To fork them is faster than torchrun."""

import os
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(train, start_method="fork"):
    """Run ``train(options)`` on as many ranks as ``--nprocs`` says; options are the other words."""
    options = sys.argv[1:]
    number = int(options[options.index("--nprocs") + 1])
    if start_method == "fork":
        import torch._dynamo  # noqa: F401  # each rank would import it for DDP
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.start_processes(
            _rank, (number, store, train, options), number, start_method=start_method
        )


def _rank(rank, world_size, store, train, options):
    os.environ["GLOO_SOCKET_IFNAME"] = (
        "lo" if "lo" in dict(map(reversed, socket.if_nameindex())) else ""
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    train(options)
    dist.destroy_process_group()
