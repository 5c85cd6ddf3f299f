"""Node classification on one graph. Every rank has a part of the nodes, and a halo around it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

NODES = 24
Batch = dict[str, Tensor]


class GraphLayer(nn.Module):
    """Sums over the neighbours, with the weights of the adjacency matrix."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.own = nn.Linear(width_in, width_out)
        self.neighbours = nn.Linear(width_in, width_out, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + self.neighbours(adjacency @ x))


class GraphNetwork(nn.Module):
    """Two rounds of messages, and a linear classifier for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(5, 8), GraphLayer(8, 8)])
        self.classes = nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.classes(x)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["features"], batch["adjacency"]), batch["classes"])


def make_batch(generator: torch.Generator) -> Batch:
    ring = torch.eye(NODES).roll(1, dims=0)
    ring[2, 9] = ring[20, 15] = ring[11, 7] = 1
    linked = ring + ring.T
    return {
        "features": torch.randn(NODES, 5, generator=generator),
        "adjacency": linked / linked.sum(1, keepdim=True),
        "classes": torch.randint(3, (NODES,), generator=generator),
    }


case = Case(model=GraphNetwork, batch=make_batch, loss=loss, layout="1x2", shards="own")


def with_halo(own: Tensor, adjacency: Tensor, layers: nn.ModuleList) -> Tensor:
    """The own nodes, and the nodes from which messages reach them."""
    reached = torch.zeros(len(adjacency), dtype=torch.bool, device=adjacency.device)
    reached[own] = True
    for _ in layers[1:]:
        reached |= (adjacency[reached] > 0).any(0)
    return reached.nonzero().squeeze(1)


def step(model: GraphNetwork, batch: Batch, rank: Rank) -> None:
    own = torch.arange(NODES, device=rank.device).chunk(rank.world_size)[rank.rank]
    nodes = with_halo(own, batch["adjacency"], model.layers)
    ddp = DistributedDataParallel(model)
    scores = ddp(batch["features"][nodes], batch["adjacency"][nodes][:, nodes])
    places = torch.searchsorted(nodes, own)
    F.cross_entropy(scores[places], batch["classes"][own]).backward()
