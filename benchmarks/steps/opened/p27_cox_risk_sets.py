"""Cox regression: the risk set of an event is everybody who is still under observation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Mesh:
    """The groups of ranks that a job on several nodes uses."""

    def __init__(self, rank):
        size = rank.local_world_size
        everyone = list(range(rank.world_size))
        groups = [dist.new_group(everyone[i : i + size]) for i in everyone[::size]]
        self.node = groups[rank.node]
        self.world = dist.group.WORLD
        self.size = rank.world_size


class Gather(Function):
    """Concatenates what the ranks of a group hold; its backward sums what they want to change."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        parts = grad.chunk(dist.get_world_size(ctx.group))
        return parts[dist.get_rank(ctx.group)], None


def build():
    return nn.Sequential(nn.Linear(9, 12), nn.ELU(), nn.Linear(12, 1, bias=False))


def patients(generator):
    n = 24
    return {
        "covariates": torch.randn(n, 9, generator=generator),
        "time": torch.rand(n, generator=generator) * 60,
        "event": torch.arange(n) % 3 != 0,
    }


def partial_likelihood(risk, time, event, risk_all, time_all):
    """Negative log partial likelihood, summed over the events in ``event`` (Breslow)."""
    at_risk = time_all.unsqueeze(0) >= time.unsqueeze(1)
    table = risk_all.unsqueeze(0).expand(len(risk), -1).masked_fill(~at_risk, float("-inf"))
    # our own time is always in the row, so no row is empty
    denominators = torch.logsumexp(table, dim=1)
    return (denominators - risk)[event].sum()


def loss(model, batch):
    risk = model(batch["covariates"]).squeeze(1)
    time, event = batch["time"], batch["event"]
    return partial_likelihood(risk, time, event, risk, time) / event.sum()


def together(mesh, value):
    return Gather.apply(value.contiguous(), mesh.node)


def events_of_all(mesh, event):
    count = event.sum()
    dist.all_reduce(count, group=mesh.world)
    return count


def step(model, shard, rank):
    mesh = Mesh(rank)
    ddp = DistributedDataParallel(model, process_group=mesh.world)
    risk = ddp(shard["covariates"]).squeeze(1)
    total = partial_likelihood(
        risk,
        shard["time"],
        shard["event"],
        together(mesh, risk),
        together(mesh, shard["time"]),
    )
    (mesh.size * total / events_of_all(mesh, shard["event"])).backward()


case = Case(model=build, batch=patients, loss=loss, layout="2x2")
