"""One cell, applied many times and recomputed each time, replicated with a static graph.

A parameter that gets gradients several times in one backward pass, inside of re-entrant
checkpoints, is what ``static_graph`` is for.
"""

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

STEPS = 3
ROWS = 8
STATE = 7


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_state = nn.Linear(STATE, STATE)
        self.of_input = nn.Linear(2, STATE, bias=False)

    def forward(self, state, value):
        return torch.tanh(self.of_state(state) + self.of_input(value))


class Rollout(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(0.3 * torch.randn(STATE))
        self.cell = Cell()
        self.read = nn.Linear(STATE, 2)
        # Is part of the model for old checkpoints; nothing calls it.
        self.unused_head = nn.Linear(STATE, 1).requires_grad_(False)

    def forward(self, series):
        state = self.start.expand(len(series), STATE)
        for value in series.unbind(1):
            state = checkpoint(self.cell, state, value, use_reentrant=True)
        return self.read(state)


def series(generator):
    noise = torch.randn(STEPS * ROWS, 6, 2, generator=generator)
    walk = noise.cumsum(1) / 2
    return {"series": walk[:, :-1], "next": walk[:, -1]}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["series"]), batch["next"])


def make_optimizer(parameters):
    trained = (one for one in parameters if one.requires_grad)
    return torch.optim.RMSprop(trained, lr=0.01, eps=0.1)


def step(model, batch, rank):
    model = replicate(model, static_graph=True, find_unused_parameters=False)
    optimizer = make_optimizer(model.parameters())
    for at in range(0, STEPS * ROWS, ROWS):
        mine = {
            name: part[at : at + ROWS].chunk(rank.world_size)[rank.rank]
            for name, part in batch.items()
        }
        optimizer.zero_grad()
        loss(model, mine).backward()
        optimizer.step()


case = Case(model=Rollout, batch=series, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
