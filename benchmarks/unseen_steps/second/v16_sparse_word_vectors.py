"""Skip-gram word vectors with negative samples; the embedding tables have sparse gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

WORDS, PAIRS, NEGATIVES = 40, 16, 3

Batch = dict[str, Tensor]


class SkipGram(nn.Module):
    def __init__(self, dimension: int = 6) -> None:
        super().__init__()
        self.center = nn.Embedding(WORDS, dimension, sparse=True)
        self.context = nn.Embedding(WORDS, dimension, sparse=True)
        self.rotate = nn.Linear(dimension, dimension, bias=False)

    def forward(self, words: Tensor, contexts: Tensor) -> Tensor:
        vectors = self.rotate(self.center(words)).unsqueeze(1)
        return (vectors * self.context(contexts)).sum(dim=-1)


def pairs(generator: torch.Generator) -> Batch:
    return {
        "words": torch.randint(WORDS, (PAIRS,), generator=generator),
        "positive": torch.randint(WORDS, (PAIRS, 1), generator=generator),
        "negative": torch.randint(WORDS, (PAIRS, NEGATIVES), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["words"], torch.cat([batch["positive"], batch["negative"]], dim=1))
    positive, negative = F.logsigmoid(scores[:, :1]), F.logsigmoid(-scores[:, 1:])
    return -(positive.sum(dim=1) + negative.sum(dim=1)).mean()


class GradientAverager:
    """Averages dense and sparse gradients; both are left where the optimizer looks for them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.world_size = dist.get_world_size()

    def average_dense(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient.div_(self.world_size)

    def average_sparse(self, gradient: Tensor) -> Tensor:
        values, indices = gradient._values(), gradient._indices()
        dist.all_reduce(values)
        values = values / self.world_size
        return torch.sparse_coo_tensor(indices, values, gradient.shape).coalesce()

    def __call__(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = self.average_sparse(parameter.grad)
            else:
                self.average_dense(parameter.grad)


class EmbeddingTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.average_gradients = GradientAverager(model)

    def train_step(self, batch: Batch) -> float:
        value = loss(self.model, batch)
        value.backward()
        self.average_gradients()
        return value.item()


case = Case(model=SkipGram, batch=pairs, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    EmbeddingTrainer(model).train_step(shard)
