"""A small classifier learns from the logits that a large one has left in a file.

The file holds logits in half precision. They are softened once, when a batch is loaded.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES, TEMPERATURE, SOFT = 7, 3.0, 0.8


@dataclass
class Recorded:
    features: Tensor
    label: Tensor
    teacher_logits: Tensor


class Student(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = F.gelu(self.enter(features))
        return self.leave(hidden + F.gelu(self.middle(hidden)))


def softened(logits: Tensor) -> Tensor:
    """Log-probabilities at a temperature at which wrong classes say something, too."""
    return (logits / TEMPERATURE).log_softmax(-1)


def loss(model: nn.Module, batch: Recorded) -> Tensor:
    logits = model(batch.features)
    teacher = softened(batch.teacher_logits)
    divergence = (teacher.exp() * (teacher - softened(logits))).sum(-1).mean()
    hard = F.cross_entropy(logits, batch.label)
    return SOFT * TEMPERATURE**2 * divergence + (1 - SOFT) * hard


def make_batch(generator: torch.Generator) -> Recorded:
    return Recorded(
        features=torch.randn(16, 8, generator=generator),
        label=torch.randint(CLASSES, (16,), generator=generator),
        teacher_logits=3 * torch.randn(16, CLASSES, generator=generator),
    )


case = Case(model=Student, batch=make_batch, loss=loss, layout="1x2")


class Distiller:
    """Mixes what the teacher says with what the label says."""

    def __init__(self, model: nn.Module, soft: float = SOFT) -> None:
        self.student = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
        self.soft = soft

    def divergence(self, logits: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div(softened(logits), teacher, reduction="batchmean") * TEMPERATURE**2

    def train_on(self, batch: Recorded) -> dict[str, float]:
        teacher = softened(batch.teacher_logits)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.student(batch.features)
        soft = self.divergence(logits, teacher)
        hard = F.cross_entropy(logits, batch.label)
        (self.soft * soft + (1 - self.soft) * hard).backward()
        self.optimizer.step()
        return {"soft": soft.item(), "hard": hard.item()}


def step(model: nn.Module, shard: Recorded, rank: Rank) -> None:
    Distiller(model).train_on(shard)
