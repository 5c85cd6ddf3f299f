"""Each block is compiled, then sharded; the first and the last layer share their weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

SIZE, LATENT = 11, 7


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.value(x)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(SIZE, LATENT)
        self.blocks = nn.ModuleList([Residual(LATENT), Residual(LATENT)])
        self.decode_bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.encode(x))
        for block in self.blocks:
            code = block(code)
        return F.linear(code, self.encode.weight.t(), self.decode_bias)


def compile_and_shard(model: TiedAutoencoder) -> None:
    for block in model.blocks:
        # In place, so that the names of the parameters stay.
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block)
    fully_shard(model)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch.sigmoid())


def signals(generator: torch.Generator) -> Tensor:
    low_rank = torch.randn(20, 3, generator=generator) @ torch.randn(3, SIZE, generator=generator)
    return low_rank + 0.1 * torch.randn(20, SIZE, generator=generator)


def step(model: TiedAutoencoder, shard: Tensor, rank) -> None:
    compile_and_shard(model)
    first, second = shard.split([3, len(shard) - 3])
    # Micro-batches of unequal size, weighted by their examples.
    for micro in (first, second):
        (loss(model, micro) * len(micro) / len(shard)).backward()


case = Case(model=TiedAutoencoder, batch=signals, loss=loss, layout="1x2")
