"""Several optimizer steps with fully_shard and gradient accumulation.

The gathered weights are kept between the micro-batches, which saves one all-gather for each.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

STEPS = 3
BIG_BATCH = 16
MICRO_BATCHES = 2
LR = 0.2


def build():
    return nn.Sequential(
        nn.Linear(6, 15),
        nn.SiLU(),
        nn.Linear(15, 15),
        nn.SiLU(),
        nn.Linear(15, 2),
    )


def data(generator):
    inputs = torch.randn(STEPS * BIG_BATCH, 6, generator=generator)
    noise = torch.randn(STEPS * BIG_BATCH, 2, generator=generator)
    return {"inputs": inputs, "targets": inputs[:, :2] * inputs[:, 2:4] + 0.1 * noise}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def batches_of(batch, rank):
    """For each step, the micro-batches of this rank."""
    own = BIG_BATCH // rank.world_size
    size = own // MICRO_BATCHES
    for number in range(STEPS):
        first = number * BIG_BATCH + rank.rank * own
        yield [
            {name: rows[start : start + size] for name, rows in batch.items()}
            for start in range(first, first + own, size)
        ]


class Accumulator:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def run(self, micro_batches):
        last = len(micro_batches) - 1
        for number, micro_batch in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(number == last)
            self.model.set_reshard_after_backward(False)
            (loss(self.model, micro_batch) / len(micro_batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step(model, batch, rank):
    fully_shard(model, reshard_after_forward=False)
    trainer = Accumulator(model, make_optimizer(model.parameters()))
    for micro_batches in batches_of(batch, rank):
        trainer.run(micro_batches)
    model.reshard()  # whoever saves the model finds the sharded weights


case = Case(model=build, batch=data, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
