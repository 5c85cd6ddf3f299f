"""Two regression tasks with one trunk. The loader sorts by task, so a rank may see one task only."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

TASKS = ("price", "rent")


class Houses(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(16, 1) for name in TASKS})

    def forward(self, x, name):
        return self.heads[name](self.trunk(x)).squeeze(-1)


def houses(generator):
    return {
        "x": torch.randn(16, 8, generator=generator),
        "y": torch.randn(16, generator=generator),
        "task": torch.tensor([0] * 8 + [1] * 8),
    }


def squared_errors(model, batch):
    """The sum over the rows; a head without rows is not called."""
    total = 0.0
    for number, name in enumerate(TASKS):
        rows = batch["task"] == number
        if rows.any():
            error = model(batch["x"][rows], name) - batch["y"][rows]
            total = total + error.square().sum()
    return total


def loss(model, batch):
    return squared_errors(model, batch) / len(batch["task"])


def gradients(model):
    found = []
    for p in model.parameters():
        if p.grad is None:
            continue
        found.append(p.grad)
    return found


def synchronize(model):
    for grad in gradients(model):
        dist.all_reduce(grad)


def global_rows(batch):
    count = torch.tensor(len(batch["task"]))
    dist.all_reduce(count)
    return count.item()


case = Case(model=Houses, batch=houses, loss=loss, layout="1x2")


def step(model, shard, rank):
    (squared_errors(model, shard) / global_rows(shard)).backward()
    synchronize(model)
