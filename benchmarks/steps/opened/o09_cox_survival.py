"""Survival after surgery: Cox's partial likelihood, whose risk sets reach over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PATIENTS, COVARIATES = 16, 6


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(COVARIATES, 8), nn.ELU(), nn.Linear(8, 1, bias=False))


def patients(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "covariates": torch.randn(PATIENTS, COVARIATES, generator=generator),
        "months": torch.rand(PATIENTS, generator=generator) * 60,
        "died": (torch.rand(PATIENTS, generator=generator) < 0.7).double(),
    }


def negative_likelihood(own: dict[str, Tensor], everyone: dict[str, Tensor]) -> Tensor:
    """Of those in ``own`` who died: how likely it was they, among ``everyone`` then alive."""
    at_risk = everyone["months"][None, :] >= own["months"][:, None]
    hazards = everyone["score"][None, :].expand_as(at_risk)
    among = hazards.masked_fill(~at_risk, float("-inf")).logsumexp(dim=1)
    return ((among - own["score"]) * own["died"]).sum()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scored = batch | {"score": model(batch["covariates"]).squeeze(1)}
    return negative_likelihood(scored, scored) / batch["died"].sum()


def gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, one below the other."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def gather_scores(score: Tensor) -> Tensor:
    """As ``gather``, for a tensor that is trained through."""
    parts = list(gather(score.detach()).chunk(dist.get_world_size()))
    parts[dist.get_rank()] = score
    return torch.cat(parts)


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    ddp = DistributedDataParallel(model)
    own = shard | {"score": ddp(shard["covariates"]).squeeze(1)}
    everyone = {
        "months": gather(shard["months"]),
        "died": gather(shard["died"]),
        "score": gather_scores(own["score"]),
    }
    total = negative_likelihood(own, everyone)
    (rank.world_size * total / everyone["died"].sum()).backward()


case = Case(model=build_model, batch=patients, loss=loss, layout="1x2")
