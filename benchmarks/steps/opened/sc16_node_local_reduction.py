"""Post-local SGD: gradients are reduced inside a node, and the weights averaged over all ranks.

With plain SGD and an average after every step this is the same as averaging all gradients, but the
collective between nodes is out of the backward pass.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STEPS, BIG_BATCH, LR = 4, 16, 0.3
START = 1  # after so many steps gradients stay in the node


def build():
    return nn.Sequential(nn.Linear(6, 14), nn.Softplus(), nn.Linear(14, 3))


def rows(generator):
    count = STEPS * BIG_BATCH
    return {
        "inputs": torch.randn(count, 6, generator=generator),
        "classes": torch.randint(0, 3, (count,), generator=generator),
    }


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["classes"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def node_group(rank):
    """The process group of the ranks of this node."""
    own = None
    for node in range(rank.nodes):
        first = node * rank.local_world_size
        group = dist.new_group(list(range(first, first + rank.local_world_size)))
        if node == rank.node:
            own = group
    return own


def hooked(model, rank):
    ddp = DistributedDataParallel(model)
    state = PostLocalSGDState(
        process_group=None, subgroup=node_group(rank), start_localSGD_iter=START
    )
    ddp.register_comm_hook(state, post_localSGD_hook)
    return ddp


def own_rows(batch, number, rank):
    size = BIG_BATCH // rank.world_size
    start = number * BIG_BATCH + rank.rank * size
    return {name: values[start : start + size] for name, values in batch.items()}


def step(model, batch, rank):
    ddp = hooked(model, rank)
    optimizer = make_optimizer(ddp.parameters())
    averager = PeriodicModelAverager(period=1, warmup_steps=100)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, own_rows(batch, number, rank)).backward()
        optimizer.step()
        averager.average_parameters(ddp.parameters())


case = Case(model=build, batch=rows, loss=loss, layout="2x2", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
