"""A contrastive loss of pytorch-metric-learning over the embeddings of all ranks."""

from __future__ import annotations

import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))


def rows(generator: torch.Generator) -> Batch:
    return {"rows": torch.randn(8, 7, generator=generator), "classes": torch.arange(8) % 3}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = ContrastiveLoss()(model(batch["rows"]), batch["classes"])
    return value


case = Case(model=build_model, batch=rows, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    DistributedLossWrapper(ContrastiveLoss())(ddp(shard["rows"]), shard["classes"]).backward()
