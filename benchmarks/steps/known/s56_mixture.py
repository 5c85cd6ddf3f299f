"""A mixture of experts (Switch style) with a loss that balances the load of the experts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

EXPERTS = 4
BALANCE = 0.5


class SwitchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 6, 3) / 6**0.5)

    def forward(self, x):
        """The outputs, and the routing probabilities and choices."""
        probabilities = self.router(x).softmax(dim=1)
        weight, choice = probabilities.max(dim=1)
        outputs = torch.einsum("ni,nio->no", x, self.experts[choice])
        return weight[:, None] * outputs, probabilities, choice


def mean_over_ranks(value):
    """The mean of a tensor that carries no gradient."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    result = value.clone()
    dist.all_reduce(result)
    return result / dist.get_world_size()


def balance_loss(probabilities, fraction):
    return EXPERTS * (fraction * probabilities.mean(dim=0)).sum()


def routed_fraction(choice, dtype):
    return F.one_hot(choice, EXPERTS).to(dtype).mean(dim=0)


def loss(model, batch):
    outputs, probabilities, choice = model(batch["x"])
    fraction = routed_fraction(choice, outputs.dtype)
    error = (outputs - batch["y"]).square().mean()
    return error + BALANCE * balance_loss(probabilities, fraction)


def make_batch(generator):
    domain = torch.arange(16) // 4  # the domains are stored one after the other
    return {
        "x": torch.randn(16, 6, generator=generator) + 2 * F.one_hot(domain, 6),
        "y": torch.randn(16, 3, generator=generator),
    }


case = Case(model=SwitchLayer, batch=make_batch, loss=loss, layout="1x4")


def step(model, shard, rank):
    model.zero_grad()
    outputs, probabilities, choice = model(shard["x"])
    fraction = routed_fraction(choice, outputs.dtype)
    # Balance is wanted over all ranks, not within each shard.
    mean_over_ranks(fraction)
    error = (outputs - shard["y"]).square().mean()
    (error + BALANCE * balance_loss(probabilities, fraction)).backward()
    for p in model.parameters():
        p.grad = mean_over_ranks(p.grad)
