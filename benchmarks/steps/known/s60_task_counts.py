"""Joint training on several tasks: the mean loss of every task counts equally."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

TASKS = (0, 0, 0, 0, 1, 1, 2, 0, 2, 2, 1, 0, 0, 0, 0, 1)


class TaskConditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.task = nn.Embedding(3, 6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def row_errors(self, batch):
        prediction = self.layers(batch["x"] + self.task(batch["task"])).squeeze(1)
        return (prediction - batch["y"]).square()


def loss(model, batch):
    errors = model.row_errors(batch)
    return sum(errors[batch["task"] == task].mean() for task in batch["task"].unique().tolist())


def make_batch(generator):
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randn(16, generator=generator),
        "task": torch.tensor(TASKS),
    }


case = Case(model=TaskConditioned, batch=make_batch, loss=loss, layout="1x2")


class TaskCounter:
    """Counts the rows of every task over all ranks. Every shard has rows of all tasks."""

    def __init__(self, task):
        self.own = {}
        for number in task.tolist():
            self.own[number] = self.own.get(number, 0) + 1

    def over_all_ranks(self, device):
        tasks = list(self.own)
        totals = torch.tensor([self.own[number] for number in tasks], device=device)
        dist.all_reduce(totals)
        return dict(zip(tasks, totals.tolist(), strict=True))


def backward(model, shard, counts):
    errors = model.row_errors(shard)
    parts = [errors[shard["task"] == task].sum() / count for task, count in counts.items()]
    sum(parts).backward()


def step(model, shard, rank):
    counts = TaskCounter(shard["task"]).over_all_ranks(rank.device)
    model.zero_grad()
    backward(model, shard, counts)
    for p in model.parameters():
        dist.all_reduce(p.grad)
