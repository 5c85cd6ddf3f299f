"""A small recurrent language model whose output layer shares the weights of the embedding."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY = 11
LENGTH = 6


class TiedModel(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.project = nn.Linear(width, VOCABULARY, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return self.project(hidden)


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_batch(generator):
    return torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)


case = Case(model=TiedModel, batch=make_batch, loss=loss, layout="1x2")


def sum_over_ranks(model):
    """All-reduce every gradient, and return how many there were."""
    count = 0
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.requires_grad and tensor.grad is not None:
            dist.all_reduce(tensor.grad)
            count += 1
    return count


def divide_gradients(params, divisor):
    for p in params:
        if p.grad is not None:
            p.grad.div_(divisor)


class LanguageModelTrainer:
    def __init__(self, model, rank):
        self.model = model
        self.world_size = rank.world_size
        self.params = list(model.parameters())

    def step(self, tokens):
        self.model.zero_grad()
        value = loss(self.model, tokens)
        value.backward()
        sum_over_ranks(self.model)
        divide_gradients(self.params, self.world_size)
        return value.item()


def step(model, shard, rank):
    LanguageModelTrainer(model, rank).step(shard)
