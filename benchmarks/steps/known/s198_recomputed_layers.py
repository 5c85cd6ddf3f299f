"""A model of proteins that bind: the activations of its layers are recomputed when needed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case, Rank

RESIDUES, WIDTH, LENGTH = 20, 8, 7

Protein = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Attention inside each chain, and a small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU())
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, same_chain: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        scores = (query @ key.mT / WIDTH**0.5).masked_fill(~same_chain, -torch.inf)
        x = x + scores.softmax(-1) @ value
        return x + self.out(self.feed(x))


class ProteinEncoder(nn.Module):
    """Describes proteins, each of which has one chain or several."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(RESIDUES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.recompute = False

    def run_layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, self.same_chain)

    def forward(self, residues: Tensor, chains: Tensor) -> Tensor:
        self.same_chain = chains[:, :, None] == chains[:, None, :]
        x = self.embed(residues)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(self.run_layer, layer, x, use_reentrant=False)
            else:
                x = self.run_layer(layer, x)
        return x.mean(1)


class Binding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = ProteinEncoder()
        self.affinity = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, receptor: Protein, ligand: Protein) -> Tensor:
        return self.affinity(self.encoder(*receptor), self.encoder(*ligand)).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(model(batch["receptor"], batch["ligand"]), batch["strength"])


def proteins(generator: torch.Generator, count: int) -> Protein:
    residues = torch.randint(0, RESIDUES, (count, LENGTH), generator=generator)
    starts = torch.rand(count, LENGTH, generator=generator) < 0.3
    return residues, starts.cumsum(1)


def make_batch(generator: torch.Generator) -> dict[str, Any]:
    strength = torch.randn(16, generator=generator)
    receptor, ligand = proteins(generator, 16), proteins(generator, 16)
    return {"receptor": receptor, "ligand": ligand, "strength": strength}


case = Case(model=Binding, batch=make_batch, loss=loss, layout="1x2")


def step(model: Binding, shard: dict[str, Any], rank: Rank) -> None:
    model.encoder.recompute = True
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
