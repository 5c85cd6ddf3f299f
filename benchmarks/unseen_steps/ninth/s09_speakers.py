"""Speaker verification, prototypical loss: one query and one support utterance per speaker."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SPEAKERS, FRAMES, MELS = 12, 9, 5


class XVector(nn.Module):
    def __init__(self):
        super().__init__()
        self.tdnn = nn.Sequential(
            nn.Conv1d(MELS, 8, 3, dilation=1),
            nn.LeakyReLU(0.1),
            nn.Conv1d(8, 8, 3, dilation=2),
            nn.LeakyReLU(0.1),
        )
        self.embed = nn.Linear(16, 6)
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, query, support):
        both = torch.cat([query, support])
        frames = self.tdnn(both)
        pooled = torch.cat([frames.mean(-1), frames.std(-1)], 1)
        query, support = F.normalize(self.embed(pooled), dim=1).chunk(2)
        return query, support, self.scale, self.bias


def sessions(generator):
    voice = torch.randn(SPEAKERS, MELS, 1, generator=generator)
    noise = torch.randn(2, SPEAKERS, MELS, FRAMES, generator=generator)
    query, support = voice + 0.8 * noise
    return {"query": query, "support": support}


def loss(model, batch):
    query, support, scale, bias = model(batch["query"], batch["support"])
    scores = scale * (query @ support.T) + bias
    return F.cross_entropy(scores, torch.arange(len(query)))


class Prototypes:
    """The supports of all ranks; those of this rank keep their graph."""

    def __init__(self, rank):
        self.rank = rank

    def gather(self, support):
        parts = [torch.empty_like(support) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, support.detach().contiguous())
        parts[self.rank.rank] = support
        return torch.cat(parts)

    def queries(self, query):
        return self.gather(query)

    def labels(self, count, device):
        return torch.arange(count, device=device)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    query, support, scale, bias = ddp(shard["query"], shard["support"])
    prototypes = Prototypes(rank)
    n = len(query)
    # All speakers' queries on every rank, so that the support has all of its gradient, too.
    all_queries, all_supports = prototypes.queries(query), prototypes.gather(support)
    scores = scale * (all_queries @ all_supports.T) + bias
    labels = prototypes.labels(n, scores.device).repeat(rank.world_size)
    per_query = F.cross_entropy(scores, labels, reduction="none")
    objective = rank.world_size * per_query.mean()
    # The two scalars see the whole batch on every rank.
    for scalar in (model.scale, model.bias):
        scalar.register_hook(lambda grad: grad / rank.world_size)
    objective.backward()


case = Case(model=XVector, batch=sessions, loss=loss)
