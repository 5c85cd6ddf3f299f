"""Fine-tuning on top of a frozen encoder, which needs no synchronisation and no hooks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case, Rank


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 10))
        self.encoder_projection = nn.Linear(10, 6)
        self.tabular = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))
        self.fusion = nn.Linear(12, 3)
        self.encoder.requires_grad_(False)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.encoder(image)
        both = [self.encoder_projection(features), self.tabular(table)]
        return self.fusion(torch.tanh(torch.cat(both, dim=1)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"], batch["table"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "image": torch.randn(16, 9, generator=generator),
        "table": torch.randn(16, 4, generator=generator),
        "label": torch.randint(0, 3, (16,), generator=generator),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="2x1")


@dataclass
class FineTuning:
    frozen: tuple[str, ...] = ("encoder",)
    bucket_cap_mb: float = 1.0
    history: list[float] = field(default_factory=list)


def tensors_of(model: nn.Module) -> Iterator[str]:
    """The names of all parameters and buffers."""
    for name, _ in model.named_parameters():
        yield name
    for name, _ in model.named_buffers():
        yield name


class FineTuner:
    def __init__(self, model: nn.Module, config: FineTuning) -> None:
        self.config = config
        self.model = self.wrap(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        ignored = [name for name in tensors_of(model) if name.startswith(self.config.frozen)]
        DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DDP(model, bucket_cap_mb=self.config.bucket_cap_mb, gradient_as_bucket_view=True)

    def training_step(self, batch: dict[str, Tensor]) -> None:
        value = loss(self.model, batch)
        value.backward()
        self.config.history.append(float(value.detach()))


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    model.train()
    FineTuner(model, FineTuning()).training_step(shard)
