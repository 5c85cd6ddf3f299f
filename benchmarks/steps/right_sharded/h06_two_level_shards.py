"""Shards inside a node, copies between nodes: FSDP2 on the inner dimension of the mesh, and our own slow-network
reduction for the outer one, so that it runs once for all micro-batches."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.conv2(F.relu(self.norm(self.conv1(x))))


class GalaxyNet(nn.Module):
    """Three surface-brightness bands in, a redshift estimate with its spread out."""

    def __init__(self, width=6, blocks=2):
        super().__init__()
        torch.manual_seed(31)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def nll(out, z):
    mean, log_sd = out.unbind(1)
    return log_sd + 0.5 * ((z - mean) * torch.exp(-log_sd)).square()


def loss(model, batch):
    return nll(model(batch["image"]), batch["z"]).mean()


class TwoLevel:
    def __init__(self, model, per_node):
        nodes = dist.get_world_size() // per_node
        self.mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("node", "inner"))
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh["inner"])
        fully_shard(model, mesh=self.mesh["inner"])
        self.model = model

    def reduce_between_nodes(self, scale):
        """Shards of the same index hold the same rows on each node: their local pieces can be summed as they are."""
        group = self.mesh["node"].get_group()
        local = [p.grad.to_local() for p in self.model.parameters()]
        flat = torch.cat([t.flatten() for t in local])
        dist.all_reduce(flat, group=group)
        flat.mul_(scale)
        for t, piece in zip(local, flat.split([t.numel() for t in local])):
            t.copy_(piece.view_as(t))


def step(model, shard, rank):
    engine = TwoLevel(model, per_node=2)
    images, z = shard["image"], shard["z"]
    micro = list(zip(images.split(1), z.split(1)))
    for i, (x, target) in enumerate(micro):
        model.set_requires_gradient_sync(i == len(micro) - 1)
        # a sum here, the number of examples comes off at the very end
        nll(model(x), target).sum().backward()
    # the inner reduction has taken the mean of its ranks; give that back and divide by all examples at once
    inner = engine.mesh["inner"].size()
    engine.reduce_between_nodes(inner / (len(z) * rank.world_size))
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def survey(g):
    return {"image": torch.randn(12, 3, 6, 6, generator=g), "z": torch.rand(12, generator=g)}


case = Case(model=GalaxyNet, batch=survey, loss=loss, layout="2x2")
