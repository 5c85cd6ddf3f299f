"""A pipeline of two stages for a model of protein sequences. The output layer reuses the embedding.

Rank 0 has the embedding and the lower layer, rank 1 has the upper layer and the scores.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

RESIDUES, WIDTH, LENGTH = 21, 8, 6
MICRO = 4


class Protein(nn.Module):
    def __init__(self):
        super().__init__()
        self.residue = nn.Embedding(RESIDUES, WIDTH)
        self.lower = nn.Linear(WIDTH, WIDTH)
        self.upper = nn.Linear(WIDTH, WIDTH)

    def stage0(self, ids):
        x = self.residue(ids)
        return x + torch.tanh(self.lower(x))

    def stage1(self, x):
        x = x + torch.tanh(self.upper(x))
        return F.linear(x, self.residue.weight)

    def forward(self, ids):
        return self.stage1(self.stage0(ids))


def sequences(generator):
    n = 16
    return {
        "ids": torch.randint(0, RESIDUES, (n, LENGTH), generator=generator),
        "masked": torch.randint(0, RESIDUES, (n, LENGTH), generator=generator),
    }


def criterion(scores, masked):
    return F.cross_entropy(scores.flatten(0, 1), masked.flatten())


def loss(model, batch):
    return criterion(model(batch["ids"]), batch["masked"])


def first_stage(model, batch):
    sent = []
    for ids in batch["ids"].chunk(MICRO):
        out = model.stage0(ids)
        dist.send(out.detach(), dst=1)
        sent.append(out)
    for out in sent:
        gradient = torch.empty_like(out)
        dist.recv(gradient, src=1)
        out.backward(gradient)


def last_stage(model, batch):
    dtype = model.upper.weight.dtype
    returned = []
    for masked in batch["masked"].chunk(MICRO):
        x = torch.empty(*masked.shape, WIDTH, dtype=dtype)
        dist.recv(x, src=0)
        x.requires_grad_()
        (criterion(model.stage1(x), masked) / MICRO).backward()
        returned.append(x.grad)
    for gradient in returned:
        dist.send(gradient, dst=0)


STAGE_OF = {"residue": 0, "lower": 0, "upper": 1}


def share(model):
    """Everybody gets the gradients of both stages."""
    for name, p in model.named_parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.broadcast(p.grad, src=STAGE_OF[name.split(".")[0]])


def step(model, batch, rank):
    (first_stage if rank == 0 else last_stage)(model, batch)
    share(model)


case = Case(model=Protein, batch=sequences, loss=loss, layout="1x2", shards="own")
