"""Node classification with a two-layer neighbourhood aggregator. The nodes are partitioned over the ranks and
the hidden states of remote neighbours are exchanged between the layers; gradients are averaged by hand."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

NODES, DEGREE, CLASSES = 24, 4, 4


class SageLayer(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.own = nn.Linear(dim_in, dim_out)
        self.neighbour = nn.Linear(dim_in, dim_out, bias=False)

    def forward(self, own, table, neighbours):
        aggregated = table[neighbours].mean(dim=1)
        return self.own(own) + self.neighbour(aggregated)


class Sage(nn.Module):
    def __init__(self, dim=10, hidden=20):
        super().__init__()
        self.first = SageLayer(dim, hidden)
        self.second = SageLayer(hidden, hidden)
        self.classify = nn.Linear(hidden, CLASSES)

    def forward(self, x, neighbours):
        h = F.relu(self.first(x, x, neighbours))
        h = F.relu(self.second(h, h, neighbours))
        return self.classify(h)


def build_model():
    return Sage()


def make_batch(generator):
    return {
        "x": torch.randn(NODES, 10, generator=generator),
        "neighbours": torch.randint(0, NODES, (NODES, DEGREE), generator=generator),
        "y": torch.randint(0, CLASSES, (NODES,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"], batch["neighbours"]), batch["y"])


class Partition:
    """Holds the place of this rank in the node table and fetches rows of the other partitions."""

    def __init__(self, rank):
        self.rank = rank.rank
        self.world_size = rank.world_size

    def full_table(self, rows):
        parts = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(parts, rows.contiguous())
        parts[self.rank] = rows
        return torch.cat(parts, dim=0)


def partitioned_forward(model, part, shard):
    neighbours = shard["neighbours"]
    features = part.full_table(shard["x"])
    h = F.relu(model.first(shard["x"], features, neighbours))
    hidden = part.full_table(h)
    h = F.relu(model.second(h, hidden, neighbours))
    return model.classify(h)


def average_gradients(model, world_size):
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad)
        p.grad.div_(world_size)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    part = Partition(rank)
    logits = partitioned_forward(model, part, shard)
    F.cross_entropy(logits, shard["y"]).backward()
    average_gradients(model, rank.world_size)
