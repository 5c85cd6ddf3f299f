"""A tagger of padded sentences: its shard is worked off in pieces, and tokens weigh alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

WORDS, TAGS, LENGTH = 20, 5, 7

Sentences = dict[str, Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.context = nn.Conv1d(6, 8, kernel_size=3, padding=1)
        self.tag = nn.Linear(8, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        context = self.context(self.embed(words).transpose(1, 2))
        return self.tag(torch.tanh(context).transpose(1, 2))


def token_losses(model: nn.Module, sentences: Sentences) -> Tensor:
    scores = model(sentences["words"])
    return F.cross_entropy(scores.transpose(1, 2), sentences["tags"], reduction="none")


def loss(model: nn.Module, batch: Sentences) -> Tensor:
    return (token_losses(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def make_batch(generator: torch.Generator) -> Sentences:
    lengths = torch.randint(2, LENGTH + 1, (12,), generator=generator)
    return {
        "words": torch.randint(0, WORDS, (12, LENGTH), generator=generator),
        "tags": torch.randint(0, TAGS, (12, LENGTH), generator=generator),
        "mask": (torch.arange(LENGTH) < lengths[:, None]).double(),
    }


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")


def cut(shard: Sentences, size: int) -> list[Sentences]:
    starts = range(0, len(shard["words"]), size)
    return [{key: rows[start : start + size] for key, rows in shard.items()} for start in starts]


def backward_in_pieces(model: nn.Module, pieces: list[Sentences]) -> None:
    tokens = torch.zeros((), dtype=torch.float64, device=pieces[0]["mask"].device)
    for piece in pieces:
        tokens += piece["mask"].sum()
    dist.all_reduce(tokens)
    for part in pieces:
        summed = (token_losses(model, part) * piece["mask"]).sum()
        (summed / tokens).backward()


def step(model: nn.Module, shard: Sentences, rank: Rank) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    backward_in_pieces(model, cut(shard, size=3))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
