"""Molecular property prediction on padded graphs: three targets with missing labels, each averaged over the molecules
that have it. The label counts are summed over ranks of unequal size and the gradients are added up."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ATOMS, FEATURES = 6, 8
WEIGHTS = {"toxicity": 1.0, "solubility": 0.5, "affinity": 2.0}


class MessagePassing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Linear(dim, dim)
        self.update = nn.Linear(2 * dim, dim)

    def forward(self, h, adjacency):
        m = adjacency @ F.relu(self.message(h))
        return h + torch.tanh(self.update(torch.cat([h, m], dim=-1)))


class MoleculeNet(nn.Module):
    def __init__(self, dim=18):
        super().__init__()
        self.inp = nn.Linear(FEATURES, dim)
        self.layers = nn.ModuleList([MessagePassing(dim) for _ in range(2)])
        self.heads = nn.ModuleDict({name: nn.Linear(dim, 1) for name in WEIGHTS})

    def forward(self, atoms, adjacency):
        h = self.inp(atoms)
        for layer in self.layers:
            h = layer(h, adjacency)
        pooled = h.mean(dim=1)
        return {name: head(pooled).squeeze(-1) for name, head in self.heads.items()}


def build_model():
    return MoleculeNet()


def make_batch(generator):
    n = 18
    bonds = (torch.rand(n, ATOMS, ATOMS, generator=generator) < 0.3).triu(1)
    known = torch.rand(n, 3, generator=generator) < torch.tensor([0.9, 0.6, 0.4])
    batch = {
        "atoms": torch.randn(n, ATOMS, FEATURES, generator=generator),
        "adjacency": (bonds | bonds.transpose(1, 2)).to(torch.get_default_dtype()),
    }
    for i, name in enumerate(WEIGHTS):
        batch[name] = torch.randn(n, generator=generator).sign() * 0.5 + 0.5
        batch[name + "_known"] = known[:, i]
    return batch


def assay_sum(name, pred, batch):
    """Sum of the errors of one target over the molecules with a label."""
    known = batch[name + "_known"]
    value, truth = pred[name][known], batch[name][known]
    if name == "toxicity":
        return F.binary_cross_entropy_with_logits(value, truth, reduction="sum")
    return F.smooth_l1_loss(value, truth, reduction="sum")


def loss(model, batch):
    pred = model(batch["atoms"], batch["adjacency"])
    return sum(w * assay_sum(k, pred, batch) / batch[k + "_known"].sum() for k, w in WEIGHTS.items())


def global_label_counts(shard):
    """One all-reduce for the counts of all targets."""
    counts = {name: shard[name + "_known"].sum() for name in WEIGHTS}
    packed = torch.stack([counts[name] for name in sorted(counts)])
    dist.all_reduce(packed)
    return dict(zip(counts, packed.tolist()))


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2", shards="10+8")


def step(model, shard, rank):
    counts = global_label_counts(shard)
    pred = model(shard["atoms"], shard["adjacency"])
    total = sum(w * assay_sum(k, pred, shard) / counts[k] for k, w in WEIGHTS.items())
    total.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
