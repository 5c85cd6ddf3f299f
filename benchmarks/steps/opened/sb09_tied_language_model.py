"""A language model with tied embeddings, built on the meta device and then sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass
class ModelArgs:
    vocabulary: int = 24
    dim: int = 16
    layers: int = 2
    length: int = 6


class Mixer(nn.Module):
    """Mixes earlier positions into later ones, then channels."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.time = nn.Parameter(torch.randn(args.length, args.length) / args.length)
        self.norm = nn.RMSNorm(args.dim)
        self.channels = nn.Linear(args.dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time.tril() @ self.norm(x)
        return x + F.silu(self.channels(x))


class TiedLanguageModel(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocabulary, args.dim)
        self.layers = nn.ModuleList(Mixer(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocabulary, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def materialize(state: dict[str, Tensor], rank: Rank) -> TiedLanguageModel:
    """A sharded model with these weights. Nothing is allocated before the shapes are known."""
    with torch.device("meta"):
        model = TiedLanguageModel(ModelArgs())
    model.to_empty(device=rank.device)
    model.load_state_dict(state)
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    # The embedding and the head stay with the root, which gathers them once for both.
    return fully_shard(model, mesh=mesh)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    args = ModelArgs()
    text = torch.randint(args.vocabulary, (16, args.length + 1), generator=generator)
    return {"inputs": text[:, :-1], "labels": text[:, 1:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())


def step(model: TiedLanguageModel, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    sharded = materialize(model.state_dict(), rank)
    loss(sharded, shard).backward()
    parameters = dict(sharded.named_parameters())
    return {name: parameters[name].grad.full_tensor() for name, _ in model.named_parameters()}


case = Case(
    model=lambda: TiedLanguageModel(ModelArgs()),
    batch=make_batch,
    loss=loss,
    layout="1x4",
    dtype=torch.float32,
)
