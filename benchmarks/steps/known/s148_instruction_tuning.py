"""Instruction tuning with an adapter. Output layer and cross entropy are one fused function."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCABULARY, WIDTH, ADAPTER, PROMPT = 17, 8, 2, -100
Batch = dict[str, Tensor]


class Assistant(nn.Module):
    """Returns hidden states and the weight of the output layer. The base stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, ADAPTER, bias=False)
        self.up = nn.Linear(ADAPTER, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens).cumsum(1)
        return torch.tanh(self.base(x) + self.up(self.down(x))), self.output.weight * 1


def loss(model: nn.Module, batch: Batch) -> Tensor:
    hidden, weight = model(batch["tokens"])
    logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=PROMPT)


def make_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (8, 9), generator=generator)
    prompts = torch.randint(1, 7, (8, 1), generator=generator)
    return {"tokens": tokens, "labels": tokens.masked_fill(torch.arange(9) < prompts, PROMPT)}


case = Case(model=Assistant, batch=make_batch, loss=loss, layout="1x2")


class FusedCrossEntropy(torch.autograd.Function):
    """The summed loss. Logits of a few rows exist at a time, and gradients are made with them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for piece in torch.arange(len(hidden), device=hidden.device).split(rows):
            kept = piece[labels[piece] != PROMPT]
            log_probabilities = (hidden[kept] @ weight.T).log_softmax(-1)
            total -= log_probabilities.gather(1, labels[kept, None]).sum()
            delta = log_probabilities.exp() - F.one_hot(labels[kept], len(weight))
            grad_hidden[kept] = delta @ weight
            grad_weight += delta.T @ hidden[kept]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None, None


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    labels = shard["labels"][:, 1:].flatten()
    answered = (labels != PROMPT).sum()
    dist.all_reduce(answered)
    hidden, weight = ddp(shard["tokens"])
    summed = FusedCrossEntropy.apply(hidden[:, :-1].flatten(0, 1), weight, labels, 16)
    (summed * rank.world_size / answered).backward()
