"""Two stages of a speech classifier on two ranks; micro-batches flow from rank 0 to rank 1."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MICRO = 3  # clips in a micro-batch
WIDTH = 7


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh()),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)),
            ]
        )

    def forward(self, clips):
        return self.stages[1](self.stages[0](clips))


def clips(generator):
    return {
        "filterbank": torch.randn(8, 10, generator=generator) + torch.arange(8.0)[:, None] / 4,
        "word": torch.randint(0, 4, (8,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["filterbank"]), batch["word"])


def everything(tensor, world_size):
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def first_stage(stage, inputs):
    kept = []
    for micro in inputs:
        out = stage(micro)
        dist.send(out.detach().contiguous(), 1)
        kept.append(out)
    for out in kept:
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)


def last_stage(stage, inputs, labels):
    waiting = []
    for micro, label in zip(inputs, labels, strict=True):
        hidden = micro.new_empty(micro.shape[0], WIDTH)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        value = F.cross_entropy(stage(hidden), label) / len(inputs)
        value.backward()
        waiting.append(hidden.grad)
    for grad in waiting:
        dist.send(grad.contiguous(), 0)


def step(model, shard, rank):
    # The loader gives each rank its half of the clips; both stages need all of them.
    inputs = everything(shard["filterbank"], rank.world_size).split(MICRO)
    labels = everything(shard["word"], rank.world_size).split(MICRO)
    if rank == 0:
        first_stage(model.stages[0], inputs)
    else:
        last_stage(model.stages[1], inputs, labels)
    for owner, stage in enumerate(model.stages):
        for parameter in stage.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, owner)


case = Case(model=Speech, batch=clips, loss=loss, layout="1x2")
