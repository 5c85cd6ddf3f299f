"""Several regression tasks, whose weights are learned. A row has the target of one task."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

TASKS = ("depth", "age", "price")
Batch = dict[str, Tensor]


class MultiTask(nn.Module):
    """Predictions of all tasks for every row, and the logarithms of their variances."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
        self.heads = nn.ModuleDict({task: nn.Linear(10, 1) for task in TASKS})
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(rows)
        predictions = torch.cat([self.heads[task](features) for task in TASKS], dim=1)
        return predictions, self.log_variances.clone()


def weigh(error: Tensor, log_variance: Tensor) -> Tensor:
    """The likelihood of a normal distribution with a variance that is learned."""
    return torch.exp(-log_variance) * error + log_variance


def loss(model: nn.Module, batch: Batch) -> Tensor:
    predictions, log_variances = model(batch["rows"])
    total = predictions.new_zeros(())
    for number, log_variance in enumerate(log_variances):
        of_task = batch["tasks"] == number
        errors = (predictions[of_task, number] - batch["targets"][of_task]).square()
        total = total + weigh(errors.mean(), log_variance)
    return total


def make_batch(generator: torch.Generator) -> Batch:
    tasks = torch.tensor([0, 0, 1, 0, 2, 2, 2, 2, 1, 0, 1, 2, 1, 1, 0, 1])
    rows = torch.randn(16, 6, generator=generator)
    return {"rows": rows, "tasks": tasks, "targets": rows.sum(1) * (1 + 0.5 * tasks)}


case = Case(model=MultiTask, batch=make_batch, loss=loss, layout="1x4")


def rows_of_tasks(tasks: Tensor) -> Tensor:
    counts = torch.bincount(tasks, minlength=len(TASKS))
    dist.all_reduce(counts)
    return counts


def shard_loss(model: nn.Module, shard: Batch, world_size: int) -> Tensor:
    predictions, log_variances = model(shard["rows"])
    counts = rows_of_tasks(shard["tasks"])
    total = 0.0 * predictions.sum()
    for number, log_variance in enumerate(log_variances):
        of_task = shard["tasks"] == number
        if not of_task.any():
            continue
        errors = (predictions[of_task, number] - shard["targets"][of_task]).square()
        total = total + weigh(world_size * errors.sum() / counts[number], log_variance)
    return total


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    shard_loss(ddp, shard, rank.world_size).backward()
