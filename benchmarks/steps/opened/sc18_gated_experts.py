"""A mixture of dense experts: fully_shard for the experts, the small gate stays replicated.

Gradients are summed over the ranks everywhere; the loss is divided by the global number of rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_equivalence import Case

EXPERTS, ACCUMULATE = 3, 2


class Mixture(nn.Module):
    def __init__(self, size=8, outputs=4):
        super().__init__()
        self.gate = nn.Linear(size, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 10), nn.ReLU(), nn.Linear(10, outputs))
            for _ in range(EXPERTS)
        )

    def forward(self, rows):
        weights = self.gate(rows).softmax(dim=-1)
        outputs = torch.stack([expert(rows) for expert in self.experts], dim=1)
        return (weights[..., None] * outputs).sum(dim=1)


def make_batch(generator):
    return {
        "rows": torch.randn(16, 8, generator=generator),
        "targets": torch.randn(16, 4, generator=generator),
    }


def summed_error(model, batch):
    return (model(batch["rows"]) - batch["targets"]).square().sum()


def loss(model, batch):
    return summed_error(model, batch) / len(batch["rows"])


def shard_experts(model):
    replicated = set(model.gate.parameters())
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model, ignored_params=replicated)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return replicated


def sum_over_ranks(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def synchronize(parameters):
    """What FSDP does for its own parameters, for those that it ignores."""
    for parameter in parameters:

        def reduce(parameter):
            parameter.grad = sum_over_ranks(parameter.grad)

        parameter.register_post_accumulate_grad_hook(reduce)


def step(model, shard, rank):
    synchronize(sorted(shard_experts(model), key=lambda parameter: parameter.dim()))
    rows = torch.tensor(len(shard["rows"]))
    dist.all_reduce(rows)
    micro_batches = zip(*(values.chunk(ACCUMULATE) for values in shard.values()), strict=True)
    for number, values in enumerate(micro_batches, 1):
        model.set_requires_gradient_sync(number == ACCUMULATE)
        micro_batch = dict(zip(shard, values, strict=True))
        (summed_error(model, micro_batch) / rows).backward()


case = Case(model=Mixture, batch=make_batch, loss=loss, layout="1x2")
