"""Pre-training with FSDP2 on a mesh: sharded within a node, replicated across the nodes.

Documents differ in length, so the loss of every rank is its sum over tokens, divided by the
tokens of the whole global batch.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case, Rank

VOCABULARY = 23
IGNORED = -100


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(F.silu(self.up(mixed)))


class Decoder(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed_loss(model, batch) / (batch["labels"] != IGNORED).sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (8, 11), generator=generator)
    lengths = torch.tensor([10, 9, 10, 7, 6, 4, 5, 3])
    padding = torch.arange(10) >= lengths.unsqueeze(1)
    return {"tokens": text[:, :-1], "labels": text[:, 1:].masked_fill(padding, IGNORED)}


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="2x2")


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def global_tokens(labels: Tensor, mesh: DeviceMesh) -> Tensor:
    tokens = (labels != IGNORED).sum()
    dist.all_reduce(tokens, group=mesh.get_group("shard"))
    return tokens


def step(model: Decoder, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    shape = (rank.nodes, rank.local_world_size)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("replicate", "shard"))
    parallelize(model, mesh)
    tokens = global_tokens(shard["labels"], mesh)
    (summed_loss(model, shard) * mesh.size() / tokens).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() for name, g in grads.items() if isinstance(g, DTensor)}
