"""Fully sharded pre-training: the loss is summed, and divided by the tokens of all ranks.

So gradients are added up over the ranks, and not averaged.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case, Rank

VOCAB, WIDTH, IGNORE = 19, 8, -100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = x.new_ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed_loss(model, batch) / (batch["labels"] != IGNORE).sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (8, 8), generator=generator)
    lengths = torch.randint(3, 8, (8, 1), generator=generator)
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(8) >= lengths, IGNORE)
    return {"tokens": tokens, "labels": labels}


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x2")


def parallelize(model: Decoder, world_size: int) -> FSDPModule:
    mesh = init_device_mesh(model.head.weight.device.type, (world_size,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    return sharded


def step(model: Decoder, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    sharded = parallelize(model, rank.world_size)
    tokens = (shard["labels"] != IGNORE).sum()
    dist.all_reduce(tokens)
    (summed_loss(sharded, shard) / tokens).backward()
    grads = {name: p.grad for name, p in sharded.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
