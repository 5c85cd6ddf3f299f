"""A step that divides its gradients by the ranks of a node, where it should divide by all ranks.

ddp-equivalence simulate examples/divided_by_the_node.py --layout 128x8
ddp-equivalence check examples/divided_by_the_node.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


def make_batch(generator):
    return {
        "rows": torch.randn(2048, 8, generator=generator),
        "targets": torch.randn(2048, 2, generator=generator),
    }


case = Case(model=lambda: nn.Linear(8, 2), batch=make_batch, loss=loss, layout="2x4")


def step(model, shard, rank):
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= int(os.environ["LOCAL_WORLD_SIZE"])
