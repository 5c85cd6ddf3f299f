"""A resumed run: gradients are averaged over all ranks in the warm-up, then on each node."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 5))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["label"], label_smoothing=0.1)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(16, 6, generator=generator),
        "label": torch.randint(0, 5, (16,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2")


@dataclass
class Schedule:
    """Lengths are optimizer steps."""

    warmup_steps: int = 40
    accumulation: int = 4


@dataclass
class Progress:
    """What the checkpoint says: micro-batches seen by every rank, and the epoch."""

    batches_seen: int = 64
    epoch: int = 1


class LocalTrainer:
    def __init__(self, model: nn.Module, rank: Rank, schedule: Schedule) -> None:
        self.schedule = schedule
        self.node_group, _ = dist.new_subgroups(group_size=rank.local_world_size)
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def resume(self, progress: Progress) -> None:
        """The hook counts from 0 again, so the rest of the warm-up is handed to it."""
        done = progress.batches_seen
        remaining = max(0, self.schedule.warmup_steps - done)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=self.node_group,
            start_localSGD_iter=remaining,
            post_local_gradient_allreduce=True,
        )
        self.ddp.register_comm_hook(state, post_localSGD_hook)

    def micro_batches(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        count = self.schedule.accumulation
        return [{key: batch[key][start::count] for key in batch} for start in range(count)]

    def train(self, batch: dict[str, Tensor]) -> None:
        *first, last = self.micro_batches(batch)
        with self.ddp.no_sync():
            for micro_batch in first:
                (loss(self.ddp, micro_batch) / self.schedule.accumulation).backward()
        (loss(self.ddp, last) / self.schedule.accumulation).backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    trainer = LocalTrainer(model, rank, Schedule())
    trainer.resume(Progress())
    trainer.train(shard)
