"""Tied weights of eleven rows on four ranks: embedding and head share one FSDP unit.

``fully_shard`` takes a list of modules, whose parameters it gathers and reduces together. The root
unit is left with no parameters at all.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from ddp_equivalence import Case

WORDS = 11  # the ranks hold 3, 3, 3 and 2 of the rows
SIZE = 6
CONTEXT = 4
OFFLOAD = {"none": OffloadPolicy, "cpu": CPUOffloadPolicy}


class ContinuousBag(nn.Module):
    """Predicts a word from those around it, with one matrix for both."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.weigh = nn.Sequential(nn.Linear(SIZE, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
        self.scores = nn.Linear(SIZE, WORDS)
        self.scores.weight = self.words.weight

    def forward(self, context):
        embedded = self.words(context)
        bag = (self.weigh(embedded).softmax(1) * embedded).sum(1)
        return self.scores(bag)


def batch(generator):
    context = torch.randint(WORDS, (20, CONTEXT), generator=generator)
    return context, (context.sum(1) + torch.randint(3, (20,), generator=generator)) % WORDS


def loss(model, batch):
    context, word = batch
    return nn.functional.nll_loss(model(context).log_softmax(-1), word)


def number_of_rows(parameter):
    return parameter.to_local().shape[0]


def shard_model(model, offload="none"):
    settings = {"reshard_after_forward": False, "offload_policy": OFFLOAD[offload]()}
    fully_shard(model.weigh, **settings)
    fully_shard([model.words, model.scores], **settings)
    return fully_shard(model, **settings)


def step(model, shard, rank):
    shard_model(model)
    assert model.words.weight is model.scores.weight
    expected = len(range(WORDS)[rank.rank * 3 : (rank.rank + 1) * 3])
    assert number_of_rows(model.words.weight) == expected
    micro_batches = list(zip(*(part.split(len(part) // 2 or 1) for part in shard), strict=True))
    rows = sum(len(word) for _, word in micro_batches)
    for context, word in micro_batches:
        (loss(model, (context, word)) * len(word) / rows).backward()


case = Case(model=ContinuousBag, batch=batch, loss=loss, layout="1x4")
