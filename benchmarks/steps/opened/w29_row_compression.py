"""Word vectors: the gradient of the big table travels as the rows that were touched."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, CONTEXT, EXAMPLES = 40, 6, 4, 18


class ContinuousBagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.projection = nn.Linear(WIDTH, WORDS)

    def forward(self, context: Tensor) -> Tensor:
        return self.projection(self.table(context).mean(1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["context"]), batch["word"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "context": torch.randint(WORDS, (EXAMPLES, CONTEXT), generator=generator),
        "word": torch.randint(WORDS, (EXAMPLES,), generator=generator),
    }


Packet = tuple[Tensor, Tensor]  # numbers of the rows, and their values


class RowCompressor:
    """Lossless: sends the rows of a gradient that are not zero, with their numbers."""

    def compress(self, grad: Tensor) -> Packet:
        rows = grad.abs().sum(1).nonzero().squeeze(1)
        return rows, grad[rows]

    def exchange(self, packet: Packet) -> list[Packet]:
        packets: list[Packet | None] = [None] * dist.get_world_size()
        dist.all_gather_object(packets, packet)
        return packets

    def decompress(self, packets: list[Packet], like: Tensor) -> Tensor:
        dense = torch.zeros_like(like)
        for rows, values in packets:
            dense[rows] = values
        return dense.div_(len(packets))


class CompressedReducer:
    def __init__(self, model: nn.Module, minimum_rows: int = 20) -> None:
        self.model = model
        self.compressor = RowCompressor()
        self.minimum_rows = minimum_rows

    def worth_compressing(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding) and module.num_embeddings >= self.minimum_rows

    def reduce(self) -> None:
        for module in self.model.children():
            for parameter in module.parameters(recurse=False):
                if self.worth_compressing(module):
                    packets = self.compressor.exchange(self.compressor.compress(parameter.grad))
                    parameter.grad = self.compressor.decompress(packets, parameter)
                else:
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(dist.get_world_size())


case = Case(model=ContinuousBagOfWords, batch=make_batch, loss=loss, layout="1x3")


def step(model, shard, rank):
    reducer = CompressedReducer(model)
    loss(model, shard).backward()
    with torch.no_grad():
        reducer.reduce()
