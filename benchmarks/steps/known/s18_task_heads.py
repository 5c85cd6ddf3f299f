"""Multi-task regression: every example belongs to one task, and each task has its own head."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

TASKS = 3


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(TASKS))

    def squared_errors(self, batch):
        hidden = self.trunk(batch["x"])
        total = hidden.new_zeros(())
        for task, head in enumerate(self.heads):
            rows = batch["task"] == task
            if rows.any():
                total = total + (head(hidden[rows]) - batch["y"][rows]).square().sum()
        return total


def loss(model, batch):
    return model.squared_errors(batch) / len(batch["x"])


def make_batch(generator):
    task = torch.randint(0, TASKS, (16,), generator=generator)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randn(16, 2, generator=generator),
        "task": task.sort().values,  # the data set is stored task by task
    }


case = Case(model=MultiTask, batch=make_batch, loss=loss, layout="1x4")


class GradientSync:
    """Averages gradients, also of heads that a rank has not used in this step."""

    def __init__(self, model):
        self.params = list(model.parameters())

    def contributors(self, device):
        used = torch.tensor([float(p.grad is not None) for p in self.params], device=device)
        dist.all_reduce(used)
        return used.tolist()

    def __call__(self):
        for p, count in zip(self.params, self.contributors(self.params[0].device), strict=True):
            if count == 0:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= count


def step(model, shard, rank):
    sync = GradientSync(model)
    model.zero_grad()
    loss(model, shard).backward()
    sync()
