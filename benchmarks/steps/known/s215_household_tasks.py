"""Multi-task learning: every example belongs to one of three tasks, and every task has a head.

The loss of a task is a mean over its examples on all ranks. All tasks count the same.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

TASKS = 3  # power, heat, water


@dataclass
class Meters:
    readings: Tensor
    task: Tensor
    target: Tensor


class Households(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, width), nn.Mish(), nn.Linear(width, width))
        self.heads = nn.Linear(width, TASKS)

    def forward(self, readings: Tensor, task: Tensor) -> Tensor:
        return self.heads(self.trunk(readings)).gather(1, task[:, None])[:, 0]


def squared_errors(model: nn.Module, meters: Meters) -> Tensor:
    return (model(meters.readings, meters.task) - meters.target).square()


def loss(model: nn.Module, meters: Meters) -> Tensor:
    errors = squared_errors(model, meters)
    return torch.stack([errors[meters.task == task].mean() for task in range(TASKS)]).mean()


def make_batch(generator: torch.Generator) -> Meters:
    return Meters(
        readings=torch.randn(16, 5, generator=generator),
        task=torch.tensor([0, 0, 1, 0, 2, 0, 1, 0, 2, 1, 2, 2, 0, 1, 2, 2]),
        target=torch.randn(16, generator=generator),
    )


case = Case(model=Households, batch=make_batch, loss=loss, layout="1x2")


class TaskMeans:
    """Adds up the mean losses of the tasks, with the examples of all ranks as their counts."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.history: dict[int, list[float]] = {task: [] for task in range(TASKS)}

    def __call__(self, errors: Tensor, tasks: Tensor) -> Tensor:
        total = errors.new_zeros(())
        for task in dict.fromkeys(tasks.tolist()):
            chosen = errors[tasks == task]
            count = torch.tensor(chosen.numel(), dtype=errors.dtype, device=errors.device)
            dist.all_reduce(count)
            mean = self.world_size * chosen.sum() / count
            self.history[task].append(mean.item())
            total = total + mean
        return total / TASKS


def step(model: nn.Module, shard: Meters, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    task_means = TaskMeans(rank.world_size)
    task_means(squared_errors(ddp, shard), shard.task).backward()
