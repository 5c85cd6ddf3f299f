"""A trainer for mixed precision: a loss scale, clipped gradients, and a scale that adapts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Case, Rank


class Scorer(nn.Module):
    """Predicts a rating from an item and the items that were seen before it."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(30, 8)
        self.history = nn.LSTM(8, 8, batch_first=True)
        self.rate = nn.Bilinear(8, 8, 1)

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        _, (state, _) = self.history(self.items(history))
        return self.rate(state[-1], self.items(item)).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.huber_loss(model(batch["history"], batch["item"]), batch["rating"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "history": torch.randint(0, 30, (16, 5), generator=generator),
        "item": torch.randint(0, 30, (16,), generator=generator),
        "rating": torch.randn(16, generator=generator),
    }


case = Case(model=Scorer, batch=make_batch, loss=loss, layout="2x1")


class LossScaler:
    """Scales the loss up, and the gradients down before they are used."""

    def __init__(self, scale: float = 2.0**12, window: int = 1000) -> None:
        self.scale, self.window, self.good_steps = scale, window, 0

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for grad in grads:
            grad.div_(self.scale)
        if all(bool(grad.isfinite().all()) for grad in grads):
            optimizer.step()
            self.good_steps += 1
        else:
            self.scale, self.good_steps = self.scale / 2, 0
        if self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0


class Trainer:
    """``max_norm`` bounds the norm of the gradient, which is far below it in a healthy run."""

    def __init__(self, model: nn.Module, max_norm: float = 20.0) -> None:
        self.ddp = DistributedDataParallel(model)
        self.max_norm = max_norm
        self.scaler = LossScaler()
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        value = loss(self.ddp, batch)
        self.scaler.scaled(value).backward()
        clip_grad_norm_(self.ddp.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        return value.detach()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model).train_step(shard)
