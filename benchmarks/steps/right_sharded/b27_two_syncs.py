"""Four micro-batches with fully_shard: two of them stay local, and gradients are reduced twice.

What a rank has not reduced yet stays whole in memory, so only two micro-batches may wait. Reduced
gradients are added to the sharded ones that are already there.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case

MICRO_BATCHES = 4
LONGEST_WAIT = 2


class Pool(nn.Module):
    """Attention of one learned query, for each of several heads."""

    def __init__(self, size, heads):
        super().__init__()
        self.query = nn.Parameter(torch.randn(heads, size))
        self.value = nn.Linear(size, size, bias=False)

    def forward(self, x):
        weights = (x @ self.query.T).softmax(1)
        return (weights.mT @ self.value(x)).flatten(1)


def build():
    return nn.Sequential(
        nn.Linear(5, 9),
        nn.Tanh(),
        Pool(9, heads=3),
        nn.Sequential(nn.Linear(27, 10), nn.SELU(), nn.Linear(10, 4)),
    )


def batch(generator):
    sets = torch.randn(32, 6, 5, generator=generator)
    return sets, sets.amax(1)[:, :4]


def loss(model, batch):
    sets, extremes = batch
    return nn.functional.mse_loss(model(sets), extremes)


class Schedule:
    """Tells the model before each micro-batch what to do after it."""

    def __init__(self, model, count, longest_wait):
        self.model, self.count, self.longest_wait = model, count, longest_wait

    def __iter__(self):
        for number in range(self.count):
            is_last = number == self.count - 1
            reduces = is_last or (number + 1) % self.longest_wait == 0
            self.model.set_is_last_backward(is_last)
            self.model.set_requires_gradient_sync(reduces)
            self.model.set_reshard_after_backward(reduces)
            yield number


def step(model, shard, rank):
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    reshard = 2 if rank.world_size > 2 else True
    for part in (model[2], model[3]):
        fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    parts = [part.chunk(MICRO_BATCHES) for part in shard]
    for number in Schedule(model, MICRO_BATCHES, LONGEST_WAIT):
        value = loss(model, tuple(part[number] for part in parts))
        value.div(MICRO_BATCHES).backward()


case = Case(model=build, batch=batch, loss=loss, layout="1x4")
