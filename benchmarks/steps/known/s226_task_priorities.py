"""Two tasks on one trunk; the task that does worse on all ranks together has the larger weight."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES = {"kind": 3, "colour": 5}
FOCUS = 1.5

Batch = dict[str, Tensor]


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(12, n) for name, n in CLASSES.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {name: head(features) for name, head in self.heads.items()}


def soft_accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """How much probability the right classes get, on average."""
    return scores.softmax(dim=-1).gather(-1, labels[:, None]).mean()


def priority(accuracy: Tensor) -> Tensor:
    return -((1 - accuracy) ** FOCUS) * accuracy.log()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    total = torch.zeros((), dtype=batch["x"].dtype)
    for name, scores in model(batch["x"]).items():
        weight = priority(soft_accuracy(scores.detach(), batch[name]))
        total = total + weight * F.cross_entropy(scores, batch[name])
    return total


def make_batch(generator: torch.Generator) -> Batch:
    batch = {"x": torch.randn(16, 8, generator=generator)}
    for name, count in CLASSES.items():
        batch[name] = torch.randint(0, count, (16,), generator=generator)
    return batch


case = Case(model=TwoTasks, batch=make_batch, loss=loss, layout="1x4")


class Meter:
    """The newest value of a metric, averaged over the ranks."""

    def __init__(self) -> None:
        self.value = torch.ones(())

    def update(self, value: Tensor) -> Tensor:
        self.value = value / dist.get_world_size()
        dist.all_reduce(self.value)
        return self.value


class MultiTaskTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.accuracy = {name: Meter() for name in CLASSES}

    def train_step(self, batch: Batch) -> dict[str, float]:
        outputs = self.ddp(batch["x"])
        losses = []
        for name, meter in self.accuracy.items():
            accuracy = meter.update(soft_accuracy(outputs[name], batch[name]))
            losses.append(priority(accuracy) * F.cross_entropy(outputs[name], batch[name]))
        torch.stack(losses).sum().backward()
        return {name: meter.value.item() for name, meter in self.accuracy.items()}


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    MultiTaskTrainer(model).train_step(shard)
