"""A hierarchical all-reduce, bucket by bucket: inside each node, then between the nodes."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv1d(6, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["signal"]), batch["gesture"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "signal": torch.randn(16, 3, 10, generator=generator),
        "gesture": torch.randint(0, 4, (16,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2-round-robin")


class Topology:
    """The group of the ranks on this node, and that of the ranks at the same place on each node."""

    def __init__(self, rank: Rank) -> None:
        every = range(rank.world_size)
        places: list[int] = [0] * rank.world_size
        dist.all_gather_object(places, rank.local_rank)
        nodes = [r // rank.local_world_size for r in every]
        self.inside = self.group_of(nodes, rank)
        self.between = self.group_of(places, rank)

    @staticmethod
    def group_of(keys: list[int], rank: Rank) -> dist.ProcessGroup:
        groups = {}
        for key in sorted(set(keys)):
            groups[key] = dist.new_group([r for r, k in enumerate(keys) if k == key])
        return groups[keys[rank.rank]]


def buckets(grads: list[Tensor], elements: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for grad in reversed(grads):
        bucket.append(grad)
        if sum(g.numel() for g in bucket) >= elements:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def reduce_bucket(bucket: list[Tensor], topology: Topology, world_size: int) -> None:
    flat = torch.cat([grad.flatten() for grad in bucket]).div_(world_size)
    for group in (topology.inside, topology.between):
        dist.all_reduce(flat, group=group)
    for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
        grad.copy_(part.view_as(grad))


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    topology = Topology(rank)
    loss(model, shard).backward()
    for bucket in buckets([p.grad for p in model.parameters()], elements=120):
        reduce_bucket(bucket, topology, rank.world_size)
