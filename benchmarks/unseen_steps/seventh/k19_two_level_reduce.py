"""Two-level averaging: inside the node first, then between the leaders of the nodes."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Denoise(nn.Module):
    """A denoising autoencoder for sensor readings."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(12, 5)
        self.decode = nn.Linear(5, 12)

    def forward(self, rows):
        return self.decode(F.elu(self.encode(rows)))


def make_batch(generator):
    clean = torch.randn(16, 3, generator=generator) @ torch.randn(3, 12, generator=generator)
    return {"clean": clean, "noisy": clean + 0.3 * torch.randn(16, 12, generator=generator)}


def loss(model, batch):
    return F.mse_loss(model(batch["noisy"]), batch["clean"])


class Topology:
    """The process groups: one per node, and one of the first ranks of all nodes."""

    def __init__(self, rank):
        self.rank, self.size = int(rank), rank.world_size
        local = rank.local_world_size
        self.leader = self.rank - rank.local_rank
        firsts = list(range(0, self.size, local))
        for first in firsts:
            group = dist.new_group(list(range(first, first + local)))
            if first == self.leader:
                self.within = group
        self.between = dist.new_group(firsts)

    @property
    def leads(self):
        return self.rank == self.leader

    def average(self, tensor):
        dist.all_reduce(tensor, group=self.within)
        if self.leads:
            dist.all_reduce(tensor, group=self.between)
        return tensor.div_(self.size)


def flatten(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def unflatten(model, flat):
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p).clone()
        start += p.numel()


def step(model, shard, rank):
    topology = Topology(rank)
    loss(model, shard).backward()
    unflatten(model, topology.average(flatten(model)))


case = Case(model=Denoise, batch=make_batch, loss=loss, layout="2x2")
