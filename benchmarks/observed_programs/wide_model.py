"""Trains a model of so many million parameters on two ranks, and prints how long each step took.

python wide_model.py MILLIONS STEPS ROWS [bfloat16] [copies] --nprocs N

With ``copies``, each of the last steps also copies the weights and, twice, the gradients, and
writes them to a file of its own: that is the least that recording it takes.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 1024

COPIED = 4
"""So many steps are copied."""


class Layer(nn.Linear):
    """Adds a little to what it is given, so that many layers keep its size."""

    def forward(self, rows):
        """The rows, with a little added."""
        return rows + 0.1 * super().forward(rows)


def train(rank, world_size, store, numbers, dtype, copies):
    """What each rank does. ``copies``: the file for copies of each step, if there is one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    millions, steps, rows_of_step = numbers
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype or default)
    net = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(millions)))
    torch.set_default_dtype(default)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(steps):
        copied = copies and step >= steps - COPIED
        begun = time.perf_counter()
        rows = torch.randn(rows_of_step, WIDTH, dtype=dtype)
        optimizer.zero_grad(set_to_none=True)
        kept = [p.detach().clone() for p in net.parameters()] if copied and rank == 0 else []
        model(rows).float().square().mean().backward()
        if copied:
            kept += [p.grad.clone() for _ in range(2) for p in net.parameters()]
            torch.save(kept, f"{copies}-{rank}-{step}")
        optimizer.step()
        if rank == 0:
            print(f"seconds of a step: {time.perf_counter() - begun:.6f}", flush=True)


if __name__ == "__main__":
    number = int(sys.argv[sys.argv.index("--nprocs") + 1])
    dtype = torch.bfloat16 if "bfloat16" in sys.argv else None
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        copies = os.path.join(folder, "copies") if "copies" in sys.argv else ""
        given = (number, store, tuple(map(int, sys.argv[1:4])), dtype, copies)
        mp.start_processes(train, given, number, start_method="fork")
