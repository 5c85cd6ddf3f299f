"""HSDP on sentences of different lengths: each token counts once, whatever rank has it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, LABELS, LONGEST, PAD = 19, 4, 10, -1


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 10)
        self.convolve = nn.Conv1d(10, 14, kernel_size=3, padding=1)
        self.label = nn.Linear(14, LABELS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).transpose(1, 2)
        return self.label(torch.tanh(self.convolve(x)).transpose(1, 2))


def sum_over_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["words"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=PAD, reduction="sum")


def number_of_tokens(batch: dict[str, Tensor]) -> Tensor:
    return batch["labels"].ne(PAD).sum()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return sum_over_tokens(model, batch) / number_of_tokens(batch)


def padded_sentences(generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.tensor([2, 2, 3, 3, 4, 5, 9, 10])
    words = torch.randint(WORDS, (len(lengths), LONGEST), generator=generator)
    padding = torch.arange(LONGEST) >= lengths[:, None]
    return {"words": words, "labels": (words % LABELS).masked_fill(padding, PAD)}


class HybridTrainer:
    def __init__(self, model: Encoder, mesh: DeviceMesh) -> None:
        fully_shard(model.convolve, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        # The ranks whose batches make up one optimiser step.
        self.batch_group = mesh.get_group("shard")

    def mean_over_all_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = number_of_tokens(batch)
        dist.all_reduce(tokens, group=self.batch_group)
        # FSDP averages, so that the sum has to be scaled up by the number of ranks.
        ranks = dist.get_world_size(self.batch_group)
        return sum_over_tokens(self.model, batch) * ranks / tokens

    def __call__(self, batch: dict[str, Tensor]) -> None:
        self.mean_over_all_tokens(batch).backward()


def step(model: Encoder, shard: dict[str, Tensor], rank) -> None:
    shape = (rank.nodes, rank.world_size // rank.nodes)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    HybridTrainer(model, mesh)(shard)


case = Case(model=Encoder, batch=padded_sentences, loss=loss, layout="2x2")
