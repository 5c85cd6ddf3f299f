"""LoRA fine-tuning of a frozen text encoder for classification, gradients averaged by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class LoraConfig:
    r: int = 2
    alpha: float = 4.0
    targets: tuple[str, ...] = ("query", "value")


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scaling = config.alpha / config.r
        self.lora_A = nn.Parameter(torch.randn(config.r, base.in_features) / math.sqrt(config.r))
        self.lora_B = nn.Parameter(0.1 * torch.randn(base.out_features, config.r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * (x @ self.lora_A.T) @ self.lora_B.T


class Encoder(nn.Module):
    def __init__(self, vocabulary: int = 31, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return x + self.output(mixed)


class Classifier(nn.Module):
    def __init__(self, encoder: Encoder, labels: int = 4) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooler = nn.Linear(12, 12)
        self.score = nn.Linear(12, labels)

    def forward(self, ids: Tensor) -> Tensor:
        pooled = self.encoder(ids).mean(dim=1)
        return self.score(torch.tanh(self.pooler(pooled)))


def get_peft_model(encoder: Encoder, config: LoraConfig) -> Encoder:
    encoder.requires_grad_(False)
    for name, module in list(encoder.named_children()):
        if name in config.targets:
            setattr(encoder, name, LoraLinear(module, config))
    return encoder


def build_model() -> nn.Module:
    return Classifier(get_peft_model(Encoder(), LoraConfig()))


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def average_gradients(parameters: list[nn.Parameter]) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, averaged in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad.copy_(averaged.view_as(parameter))


def sentences(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(31, (12, 7), generator=generator),
        "labels": torch.randint(4, (12,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]), batch["labels"])


class FineTuner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trained = adapter_parameters(model)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        value = loss(self.model, batch)
        value.backward()
        average_gradients(self.trained)
        return value.detach()


case = Case(model=build_model, batch=sentences, loss=loss, layout="1x3")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    FineTuner(model).training_step(shard)
