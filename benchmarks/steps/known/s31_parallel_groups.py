"""Groups for model and data parallelism. The ranks of a model-parallel group share their input."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MODEL_PARALLEL_SIZE = 1  # this model fits on one device


def build_model():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def loss(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["labels"])


def make_batch(generator):
    return {
        "inputs": torch.randn(16, 6, generator=generator),
        "labels": torch.randint(0, 4, (16,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2")


class ParallelState:
    def __init__(self, rank, model_parallel_size):
        self.size = model_parallel_size
        self.source = rank.rank - rank.rank % self.size
        for first in range(0, rank.world_size, self.size):
            group = dist.new_group(range(first, first + self.size))
            if first == self.source:
                self.model_parallel_group = group
        for offset in range(self.size):
            members = range(offset, rank.world_size, self.size)
            group = dist.new_group(members)
            if rank.rank in members:
                self.data_parallel_group = group


def broadcast_inputs(batch, state):
    """Only the first rank of a model-parallel group reads data; the others get it from there."""
    shared = {}
    for key in sorted(batch):
        tensor = batch[key].clone()
        dist.broadcast(tensor, src=state.source, group=state.model_parallel_group)
        shared[key] = tensor
    return shared


def reduce_gradients(model, state):
    size = dist.get_world_size(group=state.data_parallel_group)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=state.data_parallel_group)
        p.grad /= size


def initialise(rank):
    devices_per_node = rank.local_world_size
    return ParallelState(rank, model_parallel_size=devices_per_node)


def step(model, shard, rank):
    state = initialise(rank)
    batch = broadcast_inputs(shard, state)
    model.zero_grad()
    loss(model, batch).backward()
    reduce_gradients(model, state)
