"""Character model with one matrix for input and output; gradients are reduced by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

ALPHABET = 29
PAD = 0


class CharLM(nn.Module):
    def __init__(self, width=14):
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, width, padding_idx=PAD)
        self.cell = nn.LSTM(width, width, batch_first=True)
        self.project = nn.Linear(width, width)
        self.decoder = nn.Linear(width, ALPHABET)
        self.decoder.weight = self.embedding.weight

    def forward(self, text):
        hidden, _ = self.cell(self.embedding(text))
        return self.decoder(torch.tanh(self.project(hidden)))


def words(generator):
    text = torch.randint(1, ALPHABET, (8, 11), generator=generator)
    lengths = torch.randint(3, 12, (8,), generator=generator)
    return text * (torch.arange(11) < lengths[:, None])


def nll(model, text):
    logits = model(text[:, :-1])
    return F.cross_entropy(
        logits.reshape(-1, ALPHABET), text[:, 1:].reshape(-1), ignore_index=PAD, reduction="sum"
    )


def loss(model, text):
    return nll(model, text) / (text[:, 1:] != PAD).sum()


class Reducer:
    """Sums every gradient over the ranks, small tensors together in one message."""

    def __init__(self, model, small=64):
        owned = [p for m in model.modules() for p in m.parameters(recurse=False)]
        owned = [p for p in owned if p.requires_grad]
        self.small = [p for p in owned if p.numel() <= small]
        self.large = [p for p in owned if p.numel() > small]

    def _fused(self, tensors):
        flat = torch._utils._flatten_dense_tensors(tensors)
        dist.all_reduce(flat)
        for old, new in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
            old.copy_(new)

    def __call__(self):
        for parameter in self.large:
            dist.all_reduce(parameter.grad)
        if self.small:
            self._fused([p.grad for p in self.small])


def step(model, shard, rank):
    reduce = Reducer(model)
    count = (shard[:, 1:] != PAD).sum()
    dist.all_reduce(count)
    # Already divided by the characters of everyone: summing is all that is left to do.
    (nll(model, shard) / count).backward()
    reduce()


case = Case(model=CharLM, batch=words, loss=loss)
