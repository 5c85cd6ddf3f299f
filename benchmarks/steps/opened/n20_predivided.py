"""Sentence ranking with a comm hook that divides before and after the sum, against overflow."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

QUERIES, CANDIDATES, FEATURES = 12, 5, 8


class Predivide:
    """State of the hook. Half of the division (in powers of two) is done before the sum."""

    def __init__(self, world_size, group=None):
        self.group = group
        self.world_size = world_size
        self.before = 1
        while self.before * self.before < world_size:
            self.before *= 2

    @property
    def after(self):
        return self.world_size / self.before


def predivided_allreduce(state, bucket):
    tensor = bucket.buffer().div_(state.before)
    work = dist.all_reduce(tensor, group=state.group, async_op=True)

    def finish(future):
        return future.value()[0].div_(state.world_size)

    return work.get_future().then(finish)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(FEATURES, 8)
        self.candidate = nn.Linear(FEATURES, 8)
        self.mix = nn.Bilinear(8, 8, 1)

    def forward(self, query, candidates):
        query = self.query(query)[:, None].expand(-1, candidates.shape[1], -1).contiguous()
        return self.mix(torch.tanh(query), torch.tanh(self.candidate(candidates)))[..., 0]


def make_batch(generator):
    return {
        "query": torch.randn(QUERIES, FEATURES, generator=generator),
        "candidates": torch.randn(QUERIES, CANDIDATES, FEATURES, generator=generator),
        "grades": torch.randint(4, (QUERIES, CANDIDATES), generator=generator),
    }


def loss(model, batch):
    """ListNet: cross entropy between the two distributions of first places."""
    wanted = batch["grades"].to(batch["query"].dtype).softmax(-1)
    found = model(batch["query"], batch["candidates"]).log_softmax(-1)
    return -(wanted * found).sum(-1).mean()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(Predivide(rank.world_size), predivided_allreduce)
    loss(ddp, shard).backward()


case = Case(model=Scorer, batch=make_batch, loss=loss, layout="1x4")
