"""The models, batches, losses and steps that many programs share. All are small and ordinary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank

EXAMPLES = 24
"""The examples of every batch here, which 2, 3 and 4 ranks share equally."""

ROW, HIDDEN, OUTPUTS, TOKENS, LENGTH = 5, 7, 3, 11, 6
"""The numbers in a row, of a hidden layer, of outputs (or classes), of a vocabulary, of a text."""

PADDING = -100
"""The target of a token that does not count, which is what torch's cross entropy ignores."""

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


def mlp() -> nn.Module:
    """Two linear layers with a tanh between them."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))


def double_mlp() -> nn.Module:
    """The same, built in float64."""
    return mlp().double()


def deeper_mlp() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), mlp_head())


def mlp_head() -> nn.Module:
    """A tanh and a linear layer."""
    return nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))


class LanguageModel(nn.Module):
    """An embedding, a hidden layer and one score for each token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.hidden, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.head(hidden)  # type: ignore[no-any-return]


def regression(generator: torch.Generator) -> Batch:
    """Rows of numbers, and targets of the model's outputs."""
    return {
        "rows": torch.randn(EXAMPLES, ROW, generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def classes(generator: torch.Generator) -> Batch:
    """Rows of numbers, each with a class. The classes are not equally frequent."""
    labels = torch.randint(0, 2 * OUTPUTS, (EXAMPLES,), generator=generator) % (OUTPUTS + 1)
    return {
        "rows": torch.randn(EXAMPLES, ROW, generator=generator),
        "labels": labels.clamp(max=OUTPUTS - 1),
    }


def images(generator: torch.Generator) -> Batch:
    """Images of two channels and 6 x 6 pixels, and targets."""
    return {
        "rows": torch.randn(EXAMPLES, 2, 6, 6, generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def sequences(generator: torch.Generator) -> Batch:
    """Sequences of rows, and one target for each sequence."""
    return {
        "rows": torch.randn(EXAMPLES, LENGTH, ROW, generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def words(generator: torch.Generator) -> Batch:
    """Texts of equally many tokens, and one target for each text."""
    return {
        "rows": torch.randint(0, TOKENS, (EXAMPLES, LENGTH), generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def texts(generator: torch.Generator) -> Batch:
    """Texts whose targets are padded: the later a text, the fewer of its tokens count."""
    tokens = torch.randint(0, TOKENS, (EXAMPLES, LENGTH), generator=generator)
    targets = torch.randint(0, TOKENS, (EXAMPLES, LENGTH), generator=generator)
    lengths = LENGTH - torch.arange(EXAMPLES) * (LENGTH - 1) // EXAMPLES
    targets[torch.arange(LENGTH) >= lengths[:, None]] = PADDING
    return {"rows": tokens, "targets": targets}


def mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all examples and outputs."""
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all examples."""
    return F.cross_entropy(model(batch["rows"]), batch["labels"])


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all tokens that are not padding."""
    return F.cross_entropy(model(batch["rows"]).flatten(0, 1), batch["targets"].flatten())


def token_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over all tokens that are not padding."""
    scores = model(batch["rows"]).flatten(0, 1)
    return F.cross_entropy(scores, batch["targets"].flatten(), reduction="sum")


@dataclass(frozen=True)
class UnderDdp:
    """The step that most people write: wrap the model in DDP, and go backward from the loss."""

    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model, **self.options)
        self.loss(ddp, shard).backward()


@dataclass(frozen=True)
class ByHand:
    """Go backward from the loss, and average every gradient over the ranks."""

    loss: Loss

    def __call__(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        self.loss(model, shard).backward()
        average(model, rank)


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients that a backward pass has left, in the order of the parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def average(model: nn.Module, rank: Rank) -> None:
    """Average every gradient over all ranks."""
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= rank.world_size


def global_sum(value: float, rank: Rank) -> float:
    """The sum of a number over all ranks."""
    total = torch.tensor(float(value), dtype=torch.float64, device=rank.device)
    dist.all_reduce(total)
    return total.item()


def part(batch: Any, start: int, stop: int) -> Any:
    """The examples from ``start`` to ``stop`` of a dict of tensors."""
    return {name: leaf[start:stop] for name, leaf in batch.items()}


def pieces(batch: Any, size: int) -> list[Any]:
    """A dict of tensors in pieces of at most ``size`` examples."""
    examples = len(next(iter(batch.values())))
    return [part(batch, start, start + size) for start in range(0, examples, size)]
