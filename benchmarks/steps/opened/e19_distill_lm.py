"""Distillation whose weight balances the gradients of the two losses at the last layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 15, 5, 16, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DistillConfig:
    temperature: float = 2.0
    eps: float = 1e-6
    largest: float = 1e3


CONFIG = DistillConfig()


class StudentLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH + 1), generator=generator)
    return {
        "ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "teacher_logits": 2 * torch.randn(EXAMPLES, LENGTH, VOCAB, generator=generator),
    }


def both_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the labels, and the divergence from the teacher."""
    logits = model(batch["ids"]).flatten(0, 1)
    teacher = batch["teacher_logits"].flatten(0, 1)
    temperature = CONFIG.temperature
    divergence = F.kl_div(
        F.log_softmax(logits / temperature, dim=-1),
        F.log_softmax(teacher / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return F.cross_entropy(logits, batch["labels"].flatten()), divergence * temperature**2


def combine(hard: Tensor, soft: Tensor, hard_norm: Tensor, soft_norm: Tensor) -> Tensor:
    weight = (hard_norm / (soft_norm + CONFIG.eps)).clamp(max=CONFIG.largest)
    return hard + weight.detach() * soft


def loss(model: nn.Module, batch: Batch) -> Tensor:
    hard, soft = both_losses(model, batch)
    norms = [
        torch.autograd.grad(value, model.head.weight, retain_graph=True)[0].norm()
        for value in (hard, soft)
    ]
    return combine(hard, soft, *norms)


def average(tensor: Tensor) -> Tensor:
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result / dist.get_world_size()


class GradientBalancer:
    """Norms of the gradients of single losses at one parameter, over the global batch."""

    def __init__(self, param: Tensor) -> None:
        self.param = param

    def norm(self, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, self.param, retain_graph=True)
        return average(gradient.norm())

    def __call__(self, hard: Tensor, soft: Tensor) -> Tensor:
        return combine(hard, soft, self.norm(hard), self.norm(soft))


class DistillationTrainer:
    def __init__(self, student: StudentLM) -> None:
        self.student = student
        self.balance = GradientBalancer(student.head.weight)

    def train_step(self, batch: Batch) -> Tensor:
        value = self.balance(*both_losses(self.student, batch))
        value.backward()
        for param in self.student.parameters():
            param.grad.copy_(average(param.grad))
        return value.detach()


case = Case(model=StudentLM, batch=make_batch, loss=loss, layout="2x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    DistillationTrainer(model).train_step(shard)
