"""Multi-task training: a shared trunk, one head per task, and rows that belong to a single task."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class TaskSpec:
    name: str
    outputs: int
    weight: float = 1.0


@dataclass
class MultiTaskConfig:
    features: int = 7
    hidden: int = 12
    tasks: list = field(
        default_factory=lambda: [
            TaskSpec("rating", 1),
            TaskSpec("genre", 3, weight=0.5),
            TaskSpec("dwell", 1, weight=2.0),
        ]
    )


CFG = MultiTaskConfig()


class MultiTaskNet(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(cfg.features, cfg.hidden), nn.Tanh())
        self.heads = nn.ModuleDict(
            {task.name: nn.Linear(cfg.hidden, task.outputs) for task in cfg.tasks}
        )

    def forward(self, rows, task):
        return self.heads[task](self.trunk(rows))


def task_error(spec, output, target):
    if spec.outputs == 1:
        return F.mse_loss(output.squeeze(-1), target, reduction="sum")
    return F.cross_entropy(output, target.long(), reduction="sum")


def multitask_loss(model, batch, cfg=CFG):
    total = 0.0
    for index, spec in enumerate(cfg.tasks):
        rows = batch["task"] == index
        if not rows.any():
            continue
        output = model(batch["rows"][rows], spec.name)
        total = total + spec.weight * task_error(spec, output, batch["targets"][rows])
    return total / len(batch["task"])


class GradientReducer:
    """Averages gradients in the order of the parameters; heads without rows take part as zeros."""

    def __init__(self, model):
        self.named = list(model.named_parameters())

    def participants(self):
        present = torch.tensor([float(p.grad is not None) for _, p in self.named])
        dist.all_reduce(present)
        return dict(zip([name for name, _ in self.named], present.tolist(), strict=True))

    def reduce(self):
        counts = self.participants()
        for name, parameter in self.named:
            if counts[name] == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= counts[name]


class MultiTaskTrainer:
    def __init__(self, model):
        self.model = model
        self.reducer = GradientReducer(model)

    def train_step(self, batch):
        loss = multitask_loss(self.model, batch)
        loss.backward()
        self.reducer.reduce()
        return loss.item()


def make_batch(generator):
    task = torch.tensor([0, 1, 0, 0, 1, 0, 2, 1, 2, 0, 1, 2, 0, 0, 0, 1])
    rows = torch.randn(16, CFG.features, generator=generator)
    targets = torch.randn(16, generator=generator)
    genres = torch.randint(3, (16,), generator=generator).to(targets.dtype)
    return {"rows": rows, "task": task, "targets": torch.where(task == 1, genres, targets)}


case = Case(model=MultiTaskNet, batch=make_batch, loss=multitask_loss, layout="2x2")


def step(model, shard, rank):
    MultiTaskTrainer(model).train_step(shard)
