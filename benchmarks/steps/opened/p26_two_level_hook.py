"""A communication hook in two levels: within each node first, then between the nodes' leaders."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.mix = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, images):
        x = F.silu(self.stem(images))
        x = F.silu(self.mix(x))
        return self.head(x.mean(dim=(2, 3)))


def images(generator):
    return {
        "images": torch.randn(16, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 5, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


class TwoLevel:
    """State and body of the hook. Only the leaders use the slow network between the nodes."""

    def __init__(self, rank):
        self.rank = rank
        node_of = [None] * rank.world_size
        dist.all_gather_object(node_of, rank.node)
        members = [
            [r for r, node in enumerate(node_of) if node == number] for number in range(rank.nodes)
        ]
        self.groups = [dist.new_group(ranks) for ranks in members]
        self.leaders = dist.new_group([ranks[0] for ranks in members])
        self.leader = members[rank.node][0]
        self.node = self.groups[rank.node]

    def exchange(self, buffer):
        dist.all_reduce(buffer, group=self.node)
        buffer.div_(self.rank.local_world_size)
        if self.rank.rank == self.leader:
            dist.all_reduce(buffer, group=self.leaders)
            buffer.div_(self.rank.nodes)
        dist.broadcast(buffer, src=self.leader, group=self.node)
        return buffer


def two_level_hook(state: TwoLevel, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(state.exchange(bucket.buffer()))
    return future


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(TwoLevel(rank), two_level_hook)
    loss(ddp, shard).backward()


case = Case(model=Tower, batch=images, loss=loss, layout="1+3")
