"""Gradient accumulation with fully_shard, where only the root group postpones its reduction.

The blocks reduce-scatter after every micro-batch (their unsharded gradients would not fit); the
embedding and the head, which belong to the root, do it once.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_equivalence import Case

VOCAB, DIM = 29, 11  # 29 rows over 2 ranks: 15 and 14


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.proj(F.gelu(self.fc(self.norm(x))))


class BagModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(generator):
    return {
        "ids": torch.randint(0, VOCAB, (24, 5), generator=generator),
        "next": torch.randint(0, VOCAB, (24,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]), batch["next"])


class Accumulator:
    def __init__(self, model, micro_batches):
        self.model, self.micro_batches = model, micro_batches
        for i, block in enumerate(model.blocks):
            fully_shard(block, reshard_after_forward=i != len(model.blocks) - 1)
        fully_shard(model)
        assert isinstance(model, FSDPModule)

    def split(self, data):
        pieces = [t.chunk(self.micro_batches) for t in data.values()]
        return [dict(zip(data, values)) for values in zip(*pieces)]

    def run(self, data):
        micros = self.split(data)
        for i, micro in enumerate(micros):
            last = i == len(micros) - 1
            self.model.set_is_last_backward(last)
            self.model.set_requires_gradient_sync(last, recurse=False)
            # weights of the blocks stay gathered between two micro-batches
            self.model.set_reshard_after_backward(last)
            (loss(self.model, micro) / len(micros)).backward()


def step(model, shard, rank):
    Accumulator(model, micro_batches=3).run(shard)


case = Case(model=BagModel, batch=batch, loss=loss, layout="1x2")
