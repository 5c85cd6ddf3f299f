"""Two-level reduction: every rank of a node owns a chunk, and the nodes exchange the chunks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_equivalence import Case


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x):
        return self.layers(x)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": torch.randn(12, 6, generator=generator),
        "y": torch.randn(12, 3, generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="2x2")


class TwoLevelAverager:
    def __init__(self, model, rank):
        nodes = rank.world_size // rank.local_world_size
        shape = (nodes, rank.local_world_size)
        mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("nodes", "devices"))
        self.params = list(model.parameters())
        self.rank = rank
        self.within = mesh.get_group("devices")
        self.across = mesh.get_group("devices")

    def pack(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        padding = -len(flat) % self.rank.local_world_size
        return torch.cat([flat, flat.new_zeros(padding)])

    def unpack(self, flat):
        offset = 0
        for p in self.params:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()

    def average(self):
        flat = self.pack()
        dist.all_reduce(flat, group=self.within)
        chunks = list(flat.chunk(self.rank.local_world_size))
        own = chunks[self.rank.local_rank].clone()
        dist.all_reduce(own, group=self.across)
        dist.all_gather(chunks, own, group=self.within)
        self.unpack(torch.cat(chunks) / self.rank.world_size)


def step(model, shard, rank):
    averager = TwoLevelAverager(model, rank)
    model.zero_grad()
    loss(model, shard).backward()
    averager.average()
