"""Masked language model with tied embeddings; gradients are summed in hooks, during backward.

The loss is divided by the world size, so the hooks only have to add.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCAB, DIM, ROWS, LENGTH, MASK_ID = 40, 12, 8, 9, 0
MASKED_PER_ROW = 3


class TiedMLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.ffn = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU())
        self.down = nn.Linear(2 * DIM, DIM)
        self.decoder = nn.Linear(DIM, VOCAB)
        self.decoder.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.down(self.ffn(x))
        return self.decoder(x)


def build():
    return TiedMLM()


def corrupt(generator):
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator)
    scores = torch.rand(ROWS, LENGTH, generator=generator)
    chosen = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(MASKED_PER_ROW, dim=1).indices, True)
    return {"ids": ids.masked_fill(chosen, MASK_ID), "target": ids.masked_fill(~chosen, -100)}


def loss(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.transpose(1, 2), batch["target"], ignore_index=-100)


case = Case(model=build, batch=corrupt, loss=loss, layout="1x2")


class OverlappedSum:
    """Starts an all_reduce as soon as a gradient is complete."""

    def __init__(self, model):
        self.pending = []
        self.handles = []
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.handles.append(parameter.register_post_accumulate_grad_hook(self._launch))

    def _launch(self, parameter):
        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self):
        while self.pending:
            self.pending.pop(0).wait()

    def remove(self):
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    reducer = OverlappedSum(model)
    (loss(model, shard) / dist.get_world_size()).backward()
    reducer.wait()
    reducer.remove()
