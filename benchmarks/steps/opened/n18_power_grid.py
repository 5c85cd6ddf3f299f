"""Load forecast for a power grid. One machine has one card and the other three: reduce per machine."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

STATIONS, HISTORY, AHEAD = 16, 12, 4
QUANTILES = (0.1, 0.5, 0.9)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.out = nn.Linear(8, AHEAD * len(QUANTILES))

    def forward(self, load):
        _, (hidden, _) = self.lstm(load[..., None])
        return self.out(hidden[-1]).view(-1, AHEAD, len(QUANTILES))


def make_batch(generator):
    level = torch.linspace(-1, 2, STATIONS)[:, None]
    series = level + torch.randn(STATIONS, HISTORY + AHEAD, generator=generator).cumsum(-1) * 0.3
    return {"load": series[:, :HISTORY], "future": series[:, HISTORY:]}


def loss(model, batch):
    error = batch["future"][..., None] - model(batch["load"])
    quantiles = error.new_tensor(QUANTILES)
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()


class PerMachine:
    """Within a machine, then between the first ranks of the machines, then back."""

    def __init__(self, rank):
        nodes = [None] * rank.world_size
        dist.all_gather_object(nodes, rank.node)
        members = {node: [r for r, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))}
        groups = {node: dist.new_group(ranks) for node, ranks in members.items()}
        leaders = [ranks[0] for ranks in members.values()]
        self.between = dist.new_group(leaders)
        self.within, self.peers = groups[rank.node], len(members[rank.node])
        self.leader, self.machines = members[rank.node][0], len(leaders)
        self.leads = rank.rank == self.leader

    def average(self, tensor):
        dist.all_reduce(tensor, group=self.within)
        tensor /= self.peers
        if self.leads:
            dist.all_reduce(tensor, group=self.between)
            tensor /= self.machines
        dist.broadcast(tensor, src=self.leader, group=self.within)


def step(model, shard, rank):
    fabric = PerMachine(rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        fabric.average(parameter.grad)


case = Case(model=Forecast, batch=make_batch, loss=loss, layout="1+3")
