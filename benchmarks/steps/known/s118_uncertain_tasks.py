"""Several tasks on one trunk; how much a task counts is learned as the variance of its noise."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

TASKS = {"depth": 1, "normal": 3, "albedo": 2}


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 10), nn.SiLU())
        self.heads = nn.ModuleDict({name: nn.Linear(10, size) for name, size in TASKS.items()})
        self.log_variance = nn.ParameterDict(
            {name: nn.Parameter(torch.tensor(0.1 * size)) for name, size in TASKS.items()}
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {name: head(features) for name, head in self.heads.items()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(batch["x"])
    value = torch.zeros((), dtype=batch["x"].dtype)
    for name, output in outputs.items():
        error = F.mse_loss(output, batch[name])
        value = value + error / (2 * model.log_variance[name].exp()) + model.log_variance[name] / 2
    return value


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    sizes = {"x": 6, **TASKS}
    return {name: torch.randn(12, size, generator=generator) for name, size in sizes.items()}


case = Case(model=MultiTask, batch=make_batch, loss=loss, layout="1x2")


class UncertaintyLoss:
    """Adds up the tasks: a noisy task counts less, and pays for the noise that it claims."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.logged: dict[str, float] = {}

    def task(self, name: str, output: Tensor, target: Tensor) -> Tensor:
        log_variance = self.model.log_variance[name]
        precision = torch.exp(-log_variance.detach())
        self.logged[f"precision/{name}"] = precision.item()
        return 0.5 * (precision * F.mse_loss(output, target) + log_variance)

    def __call__(self, shard: dict[str, Tensor]) -> Tensor:
        outputs = self.model(shard["x"])
        return sum(self.task(name, outputs[name], shard[name]) for name in TASKS)


def mean_over_ranks(tensor: Tensor, world_size: int) -> None:
    dist.all_reduce(tensor)
    tensor /= world_size


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    criterion = UncertaintyLoss(model)
    model.zero_grad()
    criterion(shard).backward()
    for parameter in model.parameters():
        mean_over_ranks(parameter.grad, rank.world_size)
