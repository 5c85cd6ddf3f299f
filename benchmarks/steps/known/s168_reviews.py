"""Classifies reviews. A batch is cut to its longest review, so that no time is lost on padding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCABULARY, WIDTH, LONGEST, PAD = 31, 8, 12, 0


def cut(tokens: Tensor) -> Tensor:
    """The tokens without the columns that are only padding."""
    lengths = (tokens != PAD).sum(dim=1)
    return tokens[:, : int(lengths.max())]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value(x) * self.gate(x).sigmoid()


class ReviewModel(nn.Module):
    """Mean of the token features of a review, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.layers = nn.Sequential(Gated(), nn.LayerNorm(WIDTH), Gated())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = (tokens != PAD).unsqueeze(2)
        features = self.layers(self.embed(tokens)) * kept
        return self.head(self.pool(features, kept))

    def pool(self, features: Tensor, kept: Tensor) -> Tensor:
        return features.sum(dim=1) / kept.size(dim=1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(cut(batch["tokens"])), batch["stars"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.randint(2, LONGEST + 1, (16, 1), generator=generator).sort(dim=0).values
    tokens = torch.randint(1, VOCABULARY, (16, LONGEST), generator=generator)
    return {
        "tokens": tokens.masked_fill(torch.arange(LONGEST) >= lengths, PAD),
        "stars": torch.randint(3, (16,), generator=generator),
    }


case = Case(model=ReviewModel, batch=make_batch, loss=loss, layout="1x4")


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def train_step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.optimizer.step()
        self.losses.append(value.item())


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model).train_step(shard)
