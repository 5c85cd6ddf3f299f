"""HYBRID_SHARD with process groups made by hand: shards within a node, replicas across nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

VOCABULARY, WIDTH, LENGTH, PAD = 17, 12, 7, 0


class Tagger(nn.Module):
    """Tags every token with one of five classes, given its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.around = nn.Conv1d(WIDTH, WIDTH, kernel_size=3, padding=1)
        self.tags = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens)
        return self.tags(embedded + self.around(embedded.mT).mT)


class Groups(NamedTuple):
    within: dist.ProcessGroup
    across: dist.ProcessGroup

    @classmethod
    def of(cls, rank: Rank) -> Groups:
        """All ranks make all groups, in the same order."""
        per_node = rank.world_size // rank.nodes
        mine = {}
        for node in range(rank.nodes):
            members = [node * per_node + local for local in range(per_node)]
            group = dist.new_group(members)
            if rank.rank in members:
                mine["within"] = group
        for local in range(per_node):
            members = [node * per_node + local for node in range(rank.nodes)]
            group = dist.new_group(members)
            if rank.rank in members:
                mine["across"] = group
        return cls(**mine)


def sum_of_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch["tags"].masked_fill(batch["tokens"] == PAD, -100)
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), targets.flatten(), reduction="sum")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return sum_of_losses(model, batch) / (batch["tokens"] != PAD).sum()


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Sentences from long to short, so that nodes have different numbers of tokens."""
    lengths = torch.arange(16).mul(LENGTH - 1).div(15, rounding_mode="floor").flip(0) + 1
    tokens = torch.randint(1, VOCABULARY, (16, LENGTH), generator=generator)
    tokens[torch.arange(LENGTH) >= lengths[:, None]] = PAD
    return {"tokens": tokens, "tags": torch.randint(5, (16, LENGTH), generator=generator)}


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    groups = Groups.of(rank)
    fsdp = FullyShardedDataParallel(
        model,
        process_group=tuple(groups),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=always_wrap_policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        use_orig_params=True,
        device_id=rank.device,
    )
    # Tokens of the node first, then of all nodes: the two sums together are that of all ranks.
    count = (shard["tokens"] != PAD).sum()
    dist.all_reduce(count, group=groups.within)
    dist.all_reduce(count, group=groups.across)
    # FSDP averages over all ranks of both groups.
    averaged_over = groups.within.size() * groups.across.size()
    (sum_of_losses(fsdp, shard) * averaged_over / count).backward()


case = Case(model=Tagger, batch=batch, loss=loss, layout="2x2")
