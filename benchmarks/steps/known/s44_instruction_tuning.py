"""Instruction tuning: the loss is a mean over the answer tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

IGNORE = -100
VOCABULARY = 11


class CausalAverager(nn.Module):
    """Predicts a token from the mean of the embeddings so far."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.decode = nn.Linear(6, VOCABULARY)

    def forward(self, tokens):
        sums = self.embed(tokens).cumsum(dim=1)
        lengths = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return self.decode(sums / lengths[:, None])


def summed_loss(model, batch):
    logits = model(batch["tokens"])[:, :-1]
    targets = batch["labels"][:, 1:]
    return F.cross_entropy(
        logits.reshape(-1, VOCABULARY),
        targets.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
    )


def loss(model, batch):
    return summed_loss(model, batch) / (batch["labels"][:, 1:] != IGNORE).sum()


def make_batch(generator):
    tokens = torch.randint(0, VOCABULARY, (16, 7), generator=generator)
    prompt_length = torch.randint(0, 5, (16, 1), generator=generator)
    prompt_length[::5] = 0  # plain text, without a prompt
    labels = tokens.masked_fill(torch.arange(7) < prompt_length, IGNORE)
    return {"tokens": tokens, "labels": labels}


case = Case(model=CausalAverager, batch=make_batch, loss=loss, layout="1x4")


class TokenNormaliser:
    """Knows how many tokens all ranks together learn from in this step."""

    def __init__(self, shard):
        answers = shard["labels"] != IGNORE
        self.total = answers.sum()
        dist.all_reduce(self.total)

    def __call__(self, value):
        return value / self.total


def sum_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def step(model, shard, rank):
    normalise = TokenNormaliser(shard)
    model.zero_grad()
    normalise(summed_loss(model, shard)).backward()
    sum_gradients(model)
