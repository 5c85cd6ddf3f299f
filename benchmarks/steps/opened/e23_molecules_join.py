"""A graph network for molecular energies. Workers have different numbers of molecules, so the
loop runs under DDP's join, one molecule at a time, and adds the gradients up in a buffer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ATOMS, KINDS, WIDTH, ROUNDS = 6, 5, 12, 2
ASSIGNED = (3, 5)  # molecules of each worker


class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.message = nn.Linear(WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.energy = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, kinds, bonds, present):
        h = self.kinds(kinds)
        for _ in range(ROUNDS):
            received = bonds @ self.message(h)
            h = self.update(received.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return (self.energy(h).squeeze(-1) * present).sum(-1)


def molecules(generator):
    n = sum(ASSIGNED)
    count = torch.randint(3, ATOMS + 1, (n, 1), generator=generator)
    present = (torch.arange(ATOMS) < count).float()
    bonds = (torch.rand(n, ATOMS, ATOMS, generator=generator) < 0.4).float()
    bonds = torch.maximum(bonds, bonds.transpose(1, 2)) * present[:, None] * present[..., None]
    return {
        "kinds": torch.randint(KINDS, (n, ATOMS), generator=generator),
        "bonds": bonds,
        "present": present,
        "energy": torch.randn(n, generator=generator) * 2,
    }


def errors(model, batch):
    predicted = model(batch["kinds"], batch["bonds"], batch["present"])
    return nn.functional.huber_loss(predicted, batch["energy"], reduction="none")


def loss(model, batch):
    return errors(model, batch).mean()


case = Case(
    model=MessagePassing, batch=molecules, loss=loss, layout="1x2", shards="+".join(map(str, ASSIGNED))
)


def one_at_a_time(batch):
    for i in range(len(batch["energy"])):
        yield {key: value[i : i + 1] for key, value in batch.items()}


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    gradient = [torch.zeros_like(p) for p in model.parameters()]
    # every molecule counts 1 / all, whatever worker it is on; DDP averages over the workers
    weight = rank.world_size / sum(ASSIGNED)

    with ddp.join(divide_by_initial_world_size=False):
        for molecule in one_at_a_time(shard):
            model.zero_grad()
            (weight * errors(ddp, molecule).sum()).backward()
            for total, p in zip(gradient, model.parameters()):
                total += p.grad

    # the worker with the most molecules has seen all gradients
    longest = ASSIGNED.index(max(ASSIGNED))
    for total, p in zip(gradient, model.parameters()):
        dist.broadcast(total, src=longest)
        p.grad = total
