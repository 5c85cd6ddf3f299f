"""Context parallelism: the ranks of a node have consecutive parts of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH = 21, 8, 12


@dataclass
class Context:
    """Which part of the sequence this is, and with whom the rest is."""

    offset: int = 0
    group: dist.ProcessGroup | None = None

    def all_keys(self, tensor: Tensor) -> Tensor:
        if self.group is None:
            return tensor
        return all_gather_tensor_autograd(tensor, 1, self.group)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.context = Context()

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.context.all_keys(self.k(x)), self.context.all_keys(self.v(x))
        rows = torch.arange(x.shape[1])[:, None] + self.context.offset
        causal = torch.arange(keys.shape[1]) <= rows
        return F.scaled_dot_product_attention(self.q(x), keys, values, attn_mask=causal)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.GELU())
        self.head = nn.Linear(20, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.places(places)
        return self.head(self.mlp(x + self.attention(x)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["words"])
    return F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(WORDS, (4, LENGTH + 1), generator=generator)
    # Shifted before the sequence is divided, so that no target is lost where parts meet.
    return {"words": text[:, :-1], "next": text[:, 1:]}


def step(model: Gpt, batch: dict[str, Tensor], rank) -> None:
    mesh = init_device_mesh("cpu", (rank.nodes, 2), mesh_dim_names=("data", "context"))
    part, length = mesh.get_local_rank("context"), LENGTH // mesh["context"].size()
    model.attention.context = Context(offset=part * length, group=mesh.get_group("context"))
    # Weights are sharded over all ranks: those of a node also have different tokens.
    fully_shard(model.attention)
    fully_shard(model)
    mine = {
        name: tensor.chunk(rank.nodes)[rank.node][:, part * length : (part + 1) * length]
        for name, tensor in batch.items()
    }
    loss(model, mine).backward()


case = Case(model=Gpt, batch=make_batch, loss=loss, layout="2x2", shards="own")
