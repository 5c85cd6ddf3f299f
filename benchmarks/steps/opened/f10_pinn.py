"""Physics-informed network for u'' = f on [0, 1] with gradient-balanced boundary terms."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Case

POINTS = 18


class FieldNet(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.layers(x)


def derivative(u, x):
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


class PoissonProblem:
    def source(self, x):
        return -4 * math.pi**2 * torch.sin(2 * math.pi * x)

    def residual_loss(self, model, x):
        x = x.detach().requires_grad_(True)
        u = model(x)
        return (derivative(derivative(u, x), x) - self.source(x)).square().mean()

    def boundary_loss(self, model, x, value):
        return (model(x) - value).square().mean()


def world_average(tensor):
    if dist.is_initialized():
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        tensor = tensor / dist.get_world_size()
    return tensor


class GradientBalancer:
    """Weight of the boundary term: largest residual gradient over mean boundary gradient."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def flat_gradient(self, loss):
        grads = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, self.parameters, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).detach().reshape(-1) for g, p in pairs]
        )

    def weight(self, residual, boundary):
        largest = self.flat_gradient(residual).abs().max()
        typical = self.flat_gradient(boundary).abs().mean()
        return world_average(largest) / world_average(typical)


problem = PoissonProblem()


def balanced_loss(model, batch):
    residual = problem.residual_loss(model, batch["inner"])
    boundary = problem.boundary_loss(model, batch["edge"], batch["edge_value"])
    balancer = GradientBalancer(model.parameters())
    return residual + balancer.weight(residual, boundary) * boundary


class PinnSolver:
    def __init__(self, model):
        self.model = model

    def broadcast_weights(self):
        with torch.no_grad():
            flat = parameters_to_vector(self.model.parameters())
            dist.broadcast(flat, src=0)
            vector_to_parameters(flat, self.model.parameters())

    def train_step(self, batch):
        loss = balanced_loss(self.model, batch)
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = world_average(parameter.grad)
        return loss.item()


def make_batch(generator):
    inner = torch.rand(POINTS, 1, generator=generator).sort(dim=0).values
    edge = (torch.arange(POINTS) % 2).unsqueeze(-1).to(inner.dtype)
    return {"inner": inner, "edge": edge, "edge_value": 0.1 * edge}


case = Case(model=FieldNet, batch=make_batch, loss=balanced_loss, layout="1x3")


def step(model, shard, rank):
    solver = PinnSolver(model)
    solver.broadcast_weights()
    solver.train_step(shard)
