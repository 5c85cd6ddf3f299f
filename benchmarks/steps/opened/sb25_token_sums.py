"""Gradients are summed over the ranks, and losses divided by the tokens of the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

IGNORE = -100


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.gelu(self.w1(self.norm(x))))


class Decoder(nn.Module):
    """Predicts the next token from the running mean of those before."""

    def __init__(self, vocabulary: int = 21, dim: int = 12, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(FeedForward(dim) for _ in range(depth))
        self.unembed = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).cumsum(1)
        x = x / torch.arange(1, tokens.shape[1] + 1)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.unembed(x)


def parallelize(model: Decoder, mesh: DeviceMesh) -> Decoder:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def disable_gradient_division(model: nn.Module) -> None:
    """The training loop divides by the number of tokens, and FSDP need not divide again."""
    assert isinstance(model, FSDPModule)
    model.set_gradient_divide_factor(1.0)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(21, (16, 8), generator=generator)
    labels = text[:, 1:].clone()
    lengths = torch.randint(2, 8, (16,), generator=generator)
    labels[torch.arange(7) >= lengths[:, None]] = IGNORE
    return {"tokens": text[:, :-1], "labels": labels}


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", ignore_index=IGNORE)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed(model, batch) / (batch["labels"] != IGNORE).sum()


def step(model: Decoder, shard: dict[str, Tensor], rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("fsdp",))
    parallelize(model, mesh)
    disable_gradient_division(model)
    tokens = (shard["labels"] != IGNORE).sum()
    dist.all_reduce(tokens, group=mesh.get_group())
    (summed(model, shard) / tokens).backward()


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x4")
