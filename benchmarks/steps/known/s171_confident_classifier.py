"""A classifier that is kept from being too sure: the entropy of its answers is rewarded.

The terms of the objective are differentiated one by one, which tells how large each one's share
of the gradient is without another forward pass.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES, REWARD, SIZE = 5, 0.3, 0.01

Term = Callable[[Tensor, Tensor], Tensor]


class Sounds(nn.Module):
    """Tells kinds of sounds from each other by their spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(8, 10, 3, padding=1)
        self.attend = nn.Conv1d(10, 1, 1)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, spectrograms: Tensor) -> Tensor:
        x = torch.tanh(self.frames(spectrograms))
        share = self.attend(x).softmax(dim=2)
        return self.head((share * x).sum(dim=2))


def error(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def certainty(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.log_softmax(dim=1)
    return REWARD * (log_p.exp() * log_p).sum(dim=1).mean()


def size(logits: Tensor, labels: Tensor) -> Tensor:
    return SIZE * logits.logsumexp(dim=1).square().mean()


OBJECTIVE: list[Term] = [error, certainty, size]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["spectrograms"])
    return torch.stack([term(logits, batch["labels"]) for term in OBJECTIVE]).sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "spectrograms": torch.randn(12, 8, 10, generator=generator),
        "labels": torch.randint(CLASSES, (12,), generator=generator),
    }


case = Case(model=Sounds, batch=make_batch, loss=loss, layout="1x2")


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.norms: list[float] = []

    def norm(self) -> float:
        grads = [p.grad for p in self.ddp.parameters() if p.grad is not None]
        return float(torch.stack([g.norm() for g in grads]).norm())

    def train_step(self, batch: dict[str, Tensor]) -> None:
        logits = self.ddp(batch["spectrograms"])
        terms = [term(logits, batch["labels"]) for term in OBJECTIVE]
        for term in terms:
            term.backward(retain_graph=True)
            self.norms.append(self.norm())


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    model.zero_grad()
    Trainer(model).train_step(shard)
