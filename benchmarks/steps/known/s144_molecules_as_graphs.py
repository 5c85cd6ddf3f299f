"""A graph network on molecules. The graphs of a batch are joined to one graph with many parts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

SIZES = (4, 6, 3, 5, 7, 4, 5, 6)


@dataclass
class Graph:
    """``bonds`` (2, n) holds pairs of atoms; ``part`` says to which molecule an atom belongs."""

    atoms: Tensor
    bonds: Tensor
    part: Tensor
    energy: Tensor


class EnergyNet(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.message = nn.Linear(2 * width, width)
        self.energy = nn.Linear(width, 1)

    def forward(self, graph: Graph) -> Tensor:
        x = torch.tanh(self.embed(graph.atoms))
        source, target = graph.bonds
        messages = torch.relu(self.message(torch.cat([x[source], x[target]], dim=-1)))
        x = x.index_add(0, target, messages)
        by_atom = self.energy(torch.tanh(x)).squeeze(-1)
        return by_atom.new_zeros(len(graph.energy)).index_add(0, graph.part, by_atom)


def loss(model: nn.Module, graphs: list[Graph]) -> Tensor:
    errors = [F.mse_loss(model(graph), graph.energy) for graph in graphs]
    return torch.stack(errors).mean()


def make_batch(generator: torch.Generator) -> list[Graph]:
    """Molecules without rings: each atom but the first is bound to an earlier one."""
    graphs = []
    for size in SIZES:
        parents = torch.tensor(
            [int(torch.randint(i, (), generator=generator)) for i in range(1, size)]
        )
        atoms = torch.randn(size, 3, generator=generator)
        bonds = torch.stack([parents, torch.arange(1, size)])
        part = torch.zeros(size, dtype=torch.long)
        graphs.append(Graph(atoms, bonds, part, torch.randn(1, generator=generator)))
    return graphs


case = Case(model=EnergyNet, batch=make_batch, loss=loss, layout="1x2", batch_dims={"": 0})


def join(graphs: list[Graph]) -> Graph:
    bonds, parts = [], []
    offset = 0
    for number, graph in enumerate(graphs):
        bonds.append(graph.bonds + offset)
        parts.append(graph.part + number)
        offset += graph.bonds.shape[1]
    return Graph(
        atoms=torch.cat([graph.atoms for graph in graphs]),
        bonds=torch.cat(bonds, dim=1),
        part=torch.cat(parts),
        energy=torch.cat([graph.energy for graph in graphs]),
    )


def step(model: nn.Module, shard: list[Graph], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    joined = join(shard)
    ddp.zero_grad()
    F.mse_loss(ddp(joined), joined.energy).backward()
