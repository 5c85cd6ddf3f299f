"""Data parallelism with DTensor by hand: replicated weights, functional forward with local tensors.

The model's custom kernels do not take DTensors, so the forward gets the local tensor of each weight.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.func import functional_call

from ddp_equivalence import Case


class FactorizationMachine(nn.Module):
    """Linear terms and pairwise interactions of rank ``factors``."""

    def __init__(self, features=9, factors=4):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.linear = nn.Parameter(0.1 * torch.randn(features))
        self.factors = nn.Parameter(0.3 * torch.randn(features, factors))

    def forward(self, rows):
        squared_sum = (rows @ self.factors).pow(2)
        sum_squared = rows.pow(2) @ self.factors.pow(2)
        return self.bias + rows @ self.linear + (squared_sum - sum_squared).sum(1) / 2


def ratings(generator):
    rows = torch.randn(18, 9, generator=generator)
    return {"rows": rows, "ratings": rows[:, 0] * rows[:, 1] - rows[:, 2]}


def loss(model, batch):
    return (model(batch["rows"]) - batch["ratings"]).abs().pow(1.5).mean()


class DataParallel(nn.Module):
    """Holds the weights of ``module`` as DTensors that are replicated on ``mesh``."""

    def __init__(self, module, mesh):
        super().__init__()
        self.skeleton = [module]  # in a list, so that its own weights are not registered
        self.mesh = mesh
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))
                for name, weight in module.named_parameters()
            }
        )

    def local_weights(self):
        return {name: weight.to_local() for name, weight in self.weights.items()}

    def forward(self, rows):
        return functional_call(self.skeleton[0], self.local_weights(), (rows,))

    def gradients(self):
        """The gradients of the whole batch, as plain tensors."""
        found = {}
        for name, weight in self.weights.items():
            gradient = weight.grad
            assert isinstance(gradient, DTensor)
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                gradient = gradient.redistribute(placements=[Replicate()])
            found[name] = gradient.to_local()
        return found


def step(model, shard, rank):
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp",))
    parallel = DataParallel(model, mesh)
    # Each rank's mean is its share of the mean over all rows.
    (loss(parallel, shard) / mesh.size()).backward()
    return parallel.gradients()


case = Case(model=FactorizationMachine, batch=ratings, loss=loss, layout="1x2")
