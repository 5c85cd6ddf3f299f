"""A model of how far a car rolls until it stops, trained without any wrapper.

``cars.csv``: 50 measurements from the 1920s. Ezekiel, Methods of Correlation Analysis, 1930.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

CARS = Path(__file__).resolve().parent / "cars.csv"


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def load_cars() -> Tensor:
    """Speed and stopping distance of every car, (cars, 2)."""
    return torch.from_numpy(np.loadtxt(CARS, delimiter=",", skiprows=1))


def loss_function(model: nn.Module, cars: Tensor) -> Tensor:
    speed, distance = cars.split(1, dim=1)
    return F.mse_loss(model(speed), distance)


def average_gradients(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, cars: Tensor) -> None:
    optimizer.zero_grad()
    loss_function(model, cars).backward()
    average_gradients(model)
    optimizer.step()
