"""Molecules: message passing on batched graphs, one energy for each; ranks take turns by size to even the load."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

MOLECULES, MOST_ATOMS, FEATURES, HIDDEN = 16, 6, 4, 8


class GraphBatch:
    """Atoms of several molecules in one list, bonds as pairs of indices into it."""

    def __init__(self, atoms, edges, owner, size):
        self.atoms, self.edges, self.owner, self.size = atoms, edges, owner, size


def collate(features, counts):
    atoms, edges, owner, start = [], [], [], 0
    for molecule, count in enumerate(counts.tolist()):
        atoms.append(features[molecule, :count])
        chain = torch.arange(start, start + count - 1)
        edges += [torch.stack([chain, chain + 1]), torch.stack([chain + 1, chain])]
        owner.append(torch.full((count,), molecule))
        start += count
    return GraphBatch(torch.cat(atoms), torch.cat(edges, 1), torch.cat(owner), len(counts))


class EnergyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN)
        self.message = nn.Linear(2 * HIDDEN, HIDDEN)
        self.readout = nn.Linear(HIDDEN, 1)

    def forward(self, graphs):
        h = self.embed(graphs.atoms)
        source, target = graphs.edges
        messages = torch.tanh(self.message(torch.cat([h[source], h[target]], 1)))
        h = h.index_add(0, target, messages)
        pooled = h.new_zeros(graphs.size, HIDDEN).index_add(0, graphs.owner, h)
        return self.readout(pooled).squeeze(1)


def energy_loss(model, features, counts, energies):
    per_atom = (model(collate(features, counts)) - energies) / counts
    return per_atom.square().mean()


def loss(model, batch):
    return energy_loss(model, batch["features"], batch["counts"], batch["energy"])


def make_batch(generator):
    return {
        "features": torch.randn(MOLECULES, MOST_ATOMS, FEATURES, generator=generator),
        "counts": torch.randint(2, MOST_ATOMS + 1, (MOLECULES,), generator=generator),
        "energy": 4 * torch.randn(MOLECULES, generator=generator),
    }


class BalancedLoader:
    def __init__(self, data, rank, world):
        self.data = data
        self.order = data["counts"].argsort(descending=True, stable=True)
        self.rank, self.world = rank, world

    def mine(self):
        return slice(self.rank, None, self.world)

    def load(self):
        chosen = self.order[self.mine()]
        features = self.data["features"][chosen]
        counts = self.data["counts"][chosen]
        energies = self.data["energy"][self.mine()]
        return features, counts, energies


def step(model, shard, rank):
    loader = BalancedLoader(shard, dist.get_rank(), dist.get_world_size())
    ddp = DistributedDataParallel(model)
    energy_loss(ddp, *loader.load()).backward()


case = Case(model=EnergyNet, batch=make_batch, loss=loss, layout="2x2", shards="own")
