"""Fine-tuning in two phases: first the head alone, and then the whole network.

This is the beginning of the second phase, after which all parameters are trained.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


class Classifier(nn.Module):
    """A small pretrained encoder under a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 11), nn.Mish(), nn.Linear(11, 6), nn.Mish())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    return F.nll_loss(model(x).log_softmax(-1), labels)


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 7, generator=generator)
    return x, torch.randint(5, (12,), generator=generator)


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x2")


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def set_trainable(modules: Iterable[nn.Module], on: bool) -> None:
    for module in modules:
        module.requires_grad_(on)


class FineTuner:
    """``phase`` 1 trains the head; ``phase`` 2 also trains the encoder, more slowly."""

    def __init__(self, model: Classifier, phase: int, lr: float = 0.01) -> None:
        self.lr = lr
        set_trainable([model.encoder], False)
        set_trainable([model.head], True)
        self.ddp = DistributedDataParallel(model)
        if phase > 1:
            set_trainable([model.encoder], True)
        self.optimizer = self.build_optimizer(model)

    def build_optimizer(self, model: Classifier) -> torch.optim.Optimizer:
        groups = [{"params": trainable(model.head), "lr": self.lr}]
        if body := trainable(model.encoder):
            groups.append({"params": body, "lr": self.lr / 10})
        return torch.optim.SGD(groups, lr=self.lr)

    def train_on(self, batch: tuple[Tensor, Tensor]) -> float:
        self.optimizer.zero_grad()
        value = loss(self.ddp, batch)
        value.backward()
        self.optimizer.step()
        return value.item()


def step(model: Classifier, shard: tuple[Tensor, Tensor], rank: Rank) -> None:
    tuner = FineTuner(model, phase=2)
    tuner.train_on(shard)
