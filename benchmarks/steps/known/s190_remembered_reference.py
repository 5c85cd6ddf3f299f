"""Preference optimisation. What the reference model thinks of each pair is computed once, before.

Every rank computes it for its own pairs, and all of them are kept on every rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB, WIDTH, BETA = 11, 8, 0.7


class LanguageModel(nn.Module):
    """Gives the log-probability of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens[:, :-1]))
        log_probabilities = self.head(hidden).log_softmax(-1)
        return log_probabilities.gather(-1, tokens[:, 1:, None]).sum((1, 2))


class PolicyAndReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LanguageModel()
        self.reference = LanguageModel().requires_grad_(False)


def margin(model: nn.Module, pairs: dict[str, Tensor]) -> Tensor:
    return model(pairs["chosen"]) - model(pairs["rejected"])


def preference_loss(policy: nn.Module, pairs: dict[str, Tensor], reference: Tensor) -> Tensor:
    return -F.logsigmoid(BETA * (margin(policy, pairs) - reference)).mean()


def loss(model: PolicyAndReference, batch: dict[str, Tensor]) -> Tensor:
    return preference_loss(model.policy, batch, margin(model.reference, batch))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    names = ("chosen", "rejected")
    return {name: torch.randint(0, VOCAB, (16, 7), generator=generator) for name in names}


case = Case(model=PolicyAndReference, batch=make_batch, loss=loss, layout="1x2", shards="own")


class Pairs:
    """The data set as one rank sees it: every ``world_size``-th pair is its own."""

    def __init__(self, data: dict[str, Tensor], rank: Rank) -> None:
        self.data, self.rank = data, rank
        self.own = torch.arange(rank.rank, len(data["chosen"]), rank.world_size)

    def take(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: value[indices] for name, value in self.data.items()}

    @torch.no_grad()
    def reference_margins(self, reference: nn.Module) -> Tensor:
        mine = margin(reference, self.take(self.own))
        parts = [torch.empty_like(mine) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)


def step(model: PolicyAndReference, shard: dict[str, Tensor], rank: Rank) -> None:
    pairs = Pairs(shard, rank)
    remembered = pairs.reference_margins(model.reference)
    ddp = DistributedDataParallel(model.policy)
    preference_loss(ddp, pairs.take(pairs.own), remembered[pairs.own]).backward()
