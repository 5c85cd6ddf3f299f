"""News recommendation: of the large embedding table, only the rows that a rank has touched are sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

READERS, HISTORY, ARTICLES, WIDTH = 16, 5, 30, 6


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.article = nn.Embedding(ARTICLES, WIDTH)
        self.attention = nn.Linear(WIDTH, 1)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, history, candidate):
        read = self.article(history)
        weight = self.attention(read.tanh()).softmax(dim=1)
        taste = self.project((weight * read).sum(1))
        return (taste * self.article(candidate)).sum(-1)


def make_batch(generator):
    # the front page is read by everybody
    popularity = 1.0 / torch.arange(1, ARTICLES + 1)
    history = torch.multinomial(popularity, READERS * HISTORY, True, generator=generator)
    return {
        "history": history.view(READERS, HISTORY),
        "candidate": torch.randint(ARTICLES, (READERS,), generator=generator),
        "clicked": (torch.rand(READERS, generator=generator) < 0.5).float(),
    }


def loss(model, batch):
    score = model(batch["history"], batch["candidate"])
    return F.binary_cross_entropy_with_logits(score, batch["clicked"])


def touched(batch):
    return torch.unique(torch.cat([batch["history"].flatten(), batch["candidate"]]))


def gather_rows(articles, rows):
    """Article numbers and gradient rows of all ranks; how many there are differs."""
    received = [None] * dist.get_world_size()
    dist.all_gather_object(received, (articles, rows))
    return (
        torch.cat([articles for articles, _ in received]),
        torch.cat([rows for _, rows in received]),
    )


class SparseDense:
    def __init__(self, model, world_size):
        self.table = model.article.weight
        self.dense = [p for p in model.parameters() if p is not self.table]
        self.world_size = world_size

    def reduce_dense(self):
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.dense]
        for work, parameter in zip(works, self.dense):
            work.wait()
            parameter.grad /= self.world_size

    def reduce_table(self, articles):
        articles, rows = gather_rows(articles, self.table.grad[articles])
        total = torch.zeros_like(self.table)
        total[articles] += rows
        self.table.grad = total / self.world_size


def step(model, shard, rank):
    loss(model, shard).backward()
    reducer = SparseDense(model, rank.world_size)
    with torch.no_grad():
        reducer.reduce_dense()
        reducer.reduce_table(touched(shard))


case = Case(model=Reader, batch=make_batch, loss=loss, layout="1x2")
