"""Which pairs of proteins interact? Few do, so positives get the weight negatives / positives."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

NODES, FEATURES = 18, 6


class GraphLinks(nn.Module):
    """Two rounds of messages over a fixed graph, and a bilinear score of pairs."""

    def __init__(self):
        super().__init__()
        maker = torch.Generator().manual_seed(5)
        links = (torch.rand(NODES, NODES, generator=maker) < 0.2).float()
        links = ((links + links.T + torch.eye(NODES)) > 0).float()
        self.register_buffer("adjacency", links / links.sum(dim=1, keepdim=True))
        self.register_buffer("features", torch.randn(NODES, FEATURES, generator=maker))
        self.first = nn.Linear(FEATURES, 10)
        self.second = nn.Linear(10, 6)
        self.score = nn.Bilinear(6, 6, 1)

    def forward(self, pairs):
        x = torch.relu(self.adjacency @ self.first(self.features))
        x = self.adjacency @ self.second(x)
        left, right = x[pairs[:, 0]], x[pairs[:, 1]]
        return self.score(left, right).squeeze(1)


def pairs(generator):
    n = 32
    label = torch.zeros(n)
    label[[0, 3, 4, 7, 9, 12, 14, 20, 29]] = 1  # the assay of the first plate finds more
    return {"pairs": torch.randint(0, NODES, (n, 2), generator=generator), "label": label}


class BalancedEntropy:
    """Binary cross entropy with the classes balanced, per example."""

    def __init__(self, label):
        positives = label.sum()
        self.weight = (label.numel() - positives) / positives.clamp(min=1)

    def __call__(self, logits, label):
        return F.binary_cross_entropy_with_logits(
            logits, label, pos_weight=self.weight, reduction="none"
        )


def loss(model, batch):
    entropy = BalancedEntropy(batch["label"])
    return entropy(model(batch["pairs"]), batch["label"]).mean()


def labels_of_all(label, rank):
    parts = [torch.empty_like(label) for _ in range(rank.world_size)]
    dist.all_gather(parts, label)
    return torch.cat(parts)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    label = shard["label"]
    everyone = labels_of_all(label, rank)
    entropy = BalancedEntropy(label)
    values = entropy(ddp(shard["pairs"]), label)
    (rank.world_size * values.sum() / everyone.numel()).backward()


case = Case(model=GraphLinks, batch=pairs, loss=loss, layout="1x2")
