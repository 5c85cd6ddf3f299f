"""Weight decay for matrices only, momentum SGD, and FSDP that keeps the original parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from ddp_equivalence import Case, Rank

HIDDEN, CLASSES, LAYERS = 14, 5, 2
SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
WEIGHT_DECAY = 0.2
STEPS, ROWS = 2, 12


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, HIDDEN)
        self.layers = nn.Sequential(*(Residual(HIDDEN) for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)))


def reference_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The published recipe: decay the weights of linear layers, and nothing else."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    rest = [module.bias for module in linear]
    rest += [parameter for module in norms for parameter in module.parameters()]
    groups = [
        {"params": [module.weight for module in linear], "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, **SETTINGS)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # Biases and the gains of norms are vectors.
        is_matrix = parameter.ndim >= 2
        (decayed if is_matrix else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]


def batches(rows: dict[str, Tensor], rank: Rank) -> Iterator[dict[str, Tensor]]:
    each = ROWS // rank.world_size
    for number in range(STEPS):
        mine = slice(number * ROWS + rank.rank * each, number * ROWS + (rank.rank + 1) * each)
        yield {name: value[mine] for name, value in rows.items()}


def make_rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(STEPS * ROWS, 8, generator=generator),
        "labels": torch.randint(CLASSES, (STEPS * ROWS,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["features"]), batch["labels"])


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    wrap_layers = partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Residual))
    fsdp = FSDP(
        model, auto_wrap_policy=wrap_layers, use_orig_params=True, device_id=rank.device
    )
    optimizer = torch.optim.SGD(decay_groups(fsdp), **SETTINGS)
    for batch in batches(shard, rank):
        optimizer.zero_grad()
        loss(fsdp, batch).backward()
        optimizer.step()


case = Case(model=Classifier, batch=make_rows, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "optimizer": reference_optimizer, "steps": STEPS}
