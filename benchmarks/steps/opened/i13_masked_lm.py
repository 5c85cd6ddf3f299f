"""Masked language model, fine-tuned with learning rates that fall with the depth of a layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCABULARY, LENGTH, WIDTH, LAYERS = 29, 8, 8, 2
BASE, DECAY = 0.02, 0.3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(x + self.feed(x))


class MaskedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sentences(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (8, LENGTH), generator=generator)
    hidden = torch.rand(8, LENGTH, generator=generator) < 0.25
    hidden[:, 0] = True
    return {"ids": ids.masked_fill(hidden, 0), "labels": ids.where(hidden, -100)}


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed(model, batch) / (batch["labels"] != -100).sum()


def depth(name: str) -> int:
    if name.startswith("embeddings"):
        return 0
    if name.startswith("layers."):
        return 1 + int(name.split(".")[1])
    return 1 + LAYERS


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One group for each depth; the head has the base rate, and vectors do not decay."""
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        groups.setdefault((depth(name), p.ndim > 1), []).append(p)
    return torch.optim.AdamW(
        {
            "params": members,
            "lr": BASE * DECAY ** (1 + LAYERS - level),
            "weight_decay": 0.1 if matrix else 0.0,
        }
        for (level, matrix), members in groups.items()
    )


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(ddp)
    count = (shard["labels"] != -100).sum()
    dist.all_reduce(count)
    (summed(ddp, shard) * rank.world_size / count).backward()
    optimizer.step()


case = Case(model=MaskedLM, batch=sentences, loss=loss)
options = {"compare": "update", "optimizer": make_optimizer}
