"""Gradients are summed inside a node, then between one rank of each node, then handed back."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

NODES = [[0], [1, 2, 3]]


class Topology:
    """Process groups inside each node, and of the leaders of all nodes."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        for members in nodes:
            group = dist.new_group(members)
            if self.rank in members:
                self.members, self.node_group = members, group
        self.leaders = self.choose_leaders()
        self.leader_group = dist.new_group(self.leaders)

    def choose_leaders(self):
        per_node = self.world // len(self.nodes)
        return [node * per_node for node in range(len(self.nodes))]

    @property
    def is_leader(self):
        return self.rank in self.leaders


class HierarchicalReducer:
    def __init__(self, topology):
        self.topology = topology

    def mean(self, tensor):
        topology = self.topology
        dist.all_reduce(tensor, group=topology.node_group)
        if topology.is_leader:
            dist.all_reduce(tensor, group=topology.leader_group)
        dist.broadcast(tensor, src=topology.members[0], group=topology.node_group)
        return tensor.div_(topology.world)

    def attach(self, model):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: self.mean(grad.contiguous().clone()))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.decode = nn.Linear(4, 6)

    def forward(self, x):
        return self.decode(self.encode(x))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["x"])


def make_batch(generator):
    return {"x": torch.randn(16, 6, generator=generator)}


def step(model, shard, rank):
    HierarchicalReducer(Topology(NODES)).attach(model)
    loss(model, shard).backward()


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="1+3")
