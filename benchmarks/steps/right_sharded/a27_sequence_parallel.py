"""Sequence parallelism: norms on a part of the sequence, matrices on a part of the columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH = 17, 8, 6


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: Model, tp: DeviceMesh) -> None:
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            tp,
            {
                "norm": SequenceParallel(),
                "ffn": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                ),
                "ffn.up": ColwiseParallel(),
                "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def loss(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words)
    return F.cross_entropy(logits.flatten(0, 1), (words * 5 + 1).flatten() % WORDS)


def some_words(generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (8, LENGTH), generator=generator)


def step(model: Model, words: Tensor, rank) -> None:
    mesh = init_device_mesh("cpu", (rank.nodes, 2), mesh_dim_names=("dp", "tp"))
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    dp_rank, dp_size = mesh.get_local_rank("dp"), mesh["dp"].size()
    # Every second row: which rows a replica has does not matter, as long as all are used once.
    loss(model, words[dp_rank::dp_size]).backward()


case = Case(model=Model, batch=some_words, loss=loss, layout="2x2", shards="own")
