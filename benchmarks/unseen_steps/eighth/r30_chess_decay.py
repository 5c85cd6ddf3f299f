"""How hard is a chess puzzle? Squares and pieces are embedded; all weights but the embeddings are kept small."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PUZZLES, SQUARES, PIECES, WIDTH = 16, 12, 13, 5
DECAY = 0.05


class PuzzleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_piece = nn.Embedding(PIECES, WIDTH)
        self.embed_square = nn.Parameter(torch.randn(SQUARES, WIDTH))
        self.attend = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.rating = nn.Linear(WIDTH, 1)

    def forward(self, board):
        tokens = self.embed_piece(board) + self.embed_square
        mixed, _ = self.attend(tokens, tokens, tokens, need_weights=False)
        return self.rating((tokens + mixed).mean(1)).squeeze(-1)


def make_batch(generator):
    return {
        "board": torch.randint(PIECES, (PUZZLES, SQUARES), generator=generator),
        "rating": torch.randn(PUZZLES, generator=generator),
    }


def decayed(model):
    """The parameters that are decayed: an embedding has no reason to be small."""
    for name, parameter in model.named_parameters():
        if not name.startswith("embed_"):
            yield parameter


def penalty(model):
    return DECAY * sum(parameter.square().sum() for parameter in decayed(model))


def loss(model, batch):
    return F.mse_loss(model(batch["board"]), batch["rating"]) + penalty(model)


class Coach:
    def __init__(self, model):
        self.model = DistributedDataParallel(model)
        self.terms = {"fit": self.fit, "penalty": self.penalty}

    def fit(self, batch):
        return F.mse_loss(self.model(batch["board"]), batch["rating"])

    def penalty(self, batch):
        # the same on all ranks, and so is its mean
        return penalty(self.model)

    def train(self, batch):
        values = {name: term(batch) for name, term in self.terms.items()}
        sum(values.values()).backward()
        return {name: value.item() for name, value in values.items()}


def step(model, shard, rank):
    Coach(model).train(shard)


case = Case(model=PuzzleNet, batch=make_batch, loss=loss, layout="1x2")
