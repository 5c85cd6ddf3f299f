"""A fused head: logits and their gradients are computed chunk by chunk, and never kept."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB = 13
WIDTH = 6
CHUNK = 4


class FusedCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of ``hidden @ weight.T``. The forward pass also makes gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            log_probabilities = F.log_softmax(hidden[rows] @ weight.T, dim=1)
            total += F.nll_loss(log_probabilities, targets[rows], reduction="sum")
            grad_logits = log_probabilities.exp() - F.one_hot(targets[rows], VOCAB)
            grad_logits /= len(hidden)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.fused = False

    def forward(self, bigrams: Tensor, targets: Tensor) -> Tensor:
        hidden = self.block(self.embed(bigrams).flatten(1))
        if self.fused:
            return FusedCrossEntropy.apply(hidden, self.head.weight, targets)
        return F.cross_entropy(self.head(hidden), targets)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["bigrams"], batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "bigrams": torch.randint(0, VOCAB, (24, 2), generator=generator),
        "targets": torch.randint(0, VOCAB, (24,), generator=generator),
    }


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="1x2")


def train_window(ddp: nn.Module, batch: dict[str, Tensor], accumulation: int) -> None:
    for index in range(accumulation):
        micro_batch = {key: value.chunk(accumulation)[index] for key, value in batch.items()}
        last = index + 1 == accumulation
        with contextlib.nullcontext() if last else ddp.no_sync():
            value = loss(ddp, micro_batch)
            (value / accumulation).backward()


def step(model: LanguageModel, shard: dict[str, Tensor], rank: Rank) -> None:
    model.fused = True
    train_window(DistributedDataParallel(model), shard, accumulation=3)
