"""A language model with a large vocabulary, whose logits are never all in memory.

The loss works through the hidden states in chunks. It computes the gradients in the forward pass,
while the logits of a chunk are there, and the backward pass only hands them out.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCABULARY, WIDTH, PAD, CHUNK = 37, 8, 0, 7


class ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, items: Tensor) -> Tensor:
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            log_p = (hidden[part] @ weight.T).log_softmax(dim=1)
            keep = (targets[part] != PAD).to(log_p.dtype)
            picked = log_p.gather(1, targets[part][:, None])[:, 0]
            total -= (picked * keep).sum()
            grad = log_p.exp()
            grad.scatter_add_(1, targets[part][:, None], -torch.ones_like(picked)[:, None])
            grad *= keep[:, None] / items
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / items

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None, None


class LanguageModel(nn.Module):
    """Returns the features of all tokens but the last, and the weight of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.vocabulary = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(self.embed(tokens[:, :-1]))[0].reshape(-1, WIDTH), self.vocabulary


def targets_of(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].reshape(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden, weight = model(batch["tokens"])
    return F.cross_entropy(hidden @ weight.T, targets_of(batch["tokens"]), ignore_index=PAD)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (12, 8), generator=generator)
    lengths = torch.randint(3, 9, (12, 1), generator=generator)
    return {"tokens": tokens.masked_fill(torch.arange(8) >= lengths, PAD)}


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="1x3")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    targets = targets_of(shard["tokens"])
    items = (targets != PAD).sum()
    dist.all_reduce(items)
    hidden, weight = ddp(shard["tokens"])
    value = ChunkedCrossEntropy.apply(hidden, weight, targets, items)
    # The sum over ranks is wanted, and DDP takes the mean.
    (value * rank.world_size).backward()
