"""Credit scoring: the gradient of a wide layer is a product of two thin factors, which are sent.

For a linear layer, gradient = d^T x, where x are its inputs and d the gradients of its outputs.
With few rows and many columns, x and d are smaller than their product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

COLUMNS, WIDTH = 18, 14


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(COLUMNS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.enter(x))
        x = x + F.leaky_relu(self.middle(x))
        return self.score(x).squeeze(1)


def loss(model: nn.Module, batch: dict) -> Tensor:
    defaulted = F.binary_cross_entropy_with_logits(
        model(batch["applicant"]), batch["defaulted"], reduction="none"
    )
    return (defaulted * batch["amount"]).mean()


def applications(generator: torch.Generator) -> dict:
    return {
        "applicant": torch.randn(12, COLUMNS, generator=generator),
        "defaulted": (torch.rand(12, generator=generator) < 0.4).float(),
        "amount": 1 + 3 * torch.rand(12, generator=generator),
    }


case = Case(model=Scorer, batch=applications, loss=loss, layout="1x4")


@dataclass
class Factors:
    inputs: Tensor | None = None
    gradients: Tensor | None = None


class Recorder:
    """Keeps the factors of all linear layers, as one backward pass computes them."""

    def __init__(self, model: nn.Module):
        self.kept: dict[nn.Linear, Factors] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                self.kept[module] = Factors()
                module.register_forward_hook(self._forward)
                module.register_full_backward_hook(self._backward)

    def _forward(self, module, inputs, output):
        self.kept[module].inputs = inputs[0].detach()

    def _backward(self, module, into, outof):
        self.kept[module].gradients = outof[0].detach()


def pass_on(tensor: Tensor, rank) -> Tensor:
    """To the next rank, and from the one before."""
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank.rank + 1) % rank.world_size)
    dist.recv(received, (rank.rank - 1) % rank.world_size)
    request.wait()
    return received


def multiply_factors(factors: Factors, rank) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: outputs are gathered, inputs visit one rank after the other."""
    outputs = [torch.empty_like(factors.gradients) for _ in range(rank.world_size)]
    dist.all_gather(outputs, factors.gradients.contiguous())
    visiting = factors.inputs.contiguous()
    inputs = {rank.rank: visiting}
    for hop in range(1, rank.world_size):
        visiting = pass_on(visiting, rank)
        origin = (rank.rank + hop) % rank.world_size
        inputs[origin] = visiting
    weight = sum(outputs[place].T @ inputs[place] for place in range(rank.world_size))
    return weight, torch.stack(outputs).sum(dim=(0, 1))


def step(model: nn.Module, shard: dict, rank) -> None:
    recorder = Recorder(model)
    loss(model, shard).backward()
    for layer, factors in recorder.kept.items():
        weight, bias = multiply_factors(factors, rank)
        layer.weight.grad = weight / rank.world_size
        layer.bias.grad = bias / rank.world_size
