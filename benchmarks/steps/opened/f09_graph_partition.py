"""Node classification on one graph whose nodes are partitioned over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

NODES = 16
FEATURES = 6
CLASSES = 3


class GraphLayer(nn.Module):
    """Mean aggregation over incoming edges, as in GraphSAGE."""

    def __init__(self, c_in, c_out):
        super().__init__()
        self.own = nn.Linear(c_in, c_out)
        self.neighbour = nn.Linear(c_in, c_out, bias=False)

    def forward(self, x, edges):
        source, target = edges
        summed = torch.zeros_like(x).index_add_(0, target, x[source])
        degree = torch.zeros(len(x), dtype=x.dtype).index_add_(
            0, target, torch.ones(len(target), dtype=x.dtype)
        )
        return self.own(x) + self.neighbour(summed / degree.clamp(min=1).unsqueeze(-1))


class NodeClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = GraphLayer(FEATURES, 12)
        self.readout = nn.Linear(12, CLASSES)

    def forward(self, x, edges):
        return self.readout(torch.tanh(self.layer(x, edges)))


def ring_with_chords(nodes, chords=(1, 3, 7)):
    """Directed edges of a ring in which every third node has additional neighbours."""
    pairs = []
    for node in range(nodes):
        for hop in chords if node % 3 == 0 else chords[:1]:
            pairs.append(((node + hop) % nodes, node))
            pairs.append((node, (node + hop) % nodes))
    return torch.tensor(sorted(set(pairs))).T


EDGES = ring_with_chords(NODES)


class Partition:
    """The nodes of a rank, and the subgraph that it needs for them."""

    def __init__(self, edges, rank, world_size, nodes=NODES):
        per_rank = nodes // world_size
        self.nodes = torch.arange(rank * per_rank, (rank + 1) * per_rank)
        self.owned = torch.zeros(nodes, dtype=torch.bool)
        self.owned[self.nodes] = True
        self.edges = self.induced(edges)

    def induced(self, edges):
        keep = self.owned[edges].all(dim=0)
        return edges[:, keep]


def node_loss(model, batch):
    logits = model(batch["x"], EDGES)
    return F.cross_entropy(logits, batch["labels"])


class GraphTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)
        self.part = Partition(EDGES, dist.get_rank(), dist.get_world_size())

    def train_step(self, graph):
        logits = self.ddp(graph["x"], self.part.edges)
        own = self.part.nodes
        loss = F.cross_entropy(logits[own], graph["labels"][own])
        loss.backward()
        return loss.item()


def make_batch(generator):
    return {
        "x": torch.randn(NODES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (NODES,), generator=generator),
    }


case = Case(model=NodeClassifier, batch=make_batch, loss=node_loss, layout="1x2", shards="own")


def step(model, batch, rank):
    GraphTrainer(model).train_step(batch)
