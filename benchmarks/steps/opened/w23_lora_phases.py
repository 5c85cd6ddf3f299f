"""Fine-tuning with low-rank adapters: a phase for the head alone, then head and adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FEATURES, WIDTH, CLASSES, EXAMPLES = 7, 12, 5, 16


class LoRALinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(0.1 * torch.randn(outputs, rank))
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = LoRALinear(FEATURES, WIDTH)
        self.second = LoRALinear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(x)))


@dataclass(frozen=True)
class Schedule:
    head_only_steps: int = 0

    def phase(self, step: int) -> str:
        return "head" if step < self.head_only_steps else "joint"


def adapter_parameters(model: nn.Module):
    return [p for name, p in model.named_parameters() if "lora_" in name]


def set_phase(model: nn.Module, phase: str) -> None:
    for parameter in adapter_parameters(model):
        parameter.requires_grad_(phase == "joint")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


class FineTuner:
    def __init__(self, model: Classifier, schedule: Schedule) -> None:
        set_phase(model, "head")
        self.model, self.schedule = model, schedule
        self.done = 0
        self.setup()

    def setup(self) -> None:
        phase = self.schedule.phase(self.done)
        self.ddp = DistributedDataParallel(self.model)
        set_phase(self.model, phase)

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        value = loss(self.ddp, batch)
        value.backward()
        self.done += 1
        return value.detach()


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    FineTuner(model, Schedule()).train_step(shard)
