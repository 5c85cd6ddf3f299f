"""A setup in stages: model, optimizer and scheduler come from a recipe, and FSDP wraps last.

With ``use_orig_params`` FSDP keeps the parameter objects that it was given, so the optimizer of the
recipe goes on working: each rank's parameters become views of its part of the flat parameter.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import LambdaLR

from ddp_equivalence import Case

STEPS = 3
ROWS = 8  # of all ranks, in one step


class Recipe:
    """Builds everything that does not know of ranks."""

    warmup = 2
    lr = 0.3

    def model(self):
        return nn.Sequential(
            nn.Linear(6, 10),
            nn.LayerNorm(10),
            nn.Tanh(),
            nn.Linear(10, 10),
            nn.Tanh(),
            nn.Linear(10, 3),
        )

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.8, nesterov=True)

    def scheduler(self, optimizer):
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup + 1)))

    def optimizer_and_scheduler(self, parameters):
        optimizer = self.optimizer(parameters)
        return [optimizer, self.scheduler(optimizer)]


recipe = Recipe()




def batch(generator):
    return {
        "inputs": torch.randn(ROWS * STEPS, 6, generator=generator),
        "classes": torch.randint(3, (ROWS * STEPS,), generator=generator),
    }


def loss(model, batch):
    return nn.functional.cross_entropy(
        model(batch["inputs"]), batch["classes"], label_smoothing=0.05
    )


def rows_of(batch, rank):
    """The rank's rows of every step: of the eight rows of a step, each rank takes every second."""
    for at in range(0, ROWS * STEPS, ROWS):
        yield {
            name: values[at : at + ROWS][rank.rank :: rank.world_size]
            for name, values in batch.items()
        }


def wrap(model, rank):
    def policy(module, recurse, nonwrapped_numel):
        return size_based_auto_wrap_policy(
            module, recurse, nonwrapped_numel, min_num_params=100
        )

    return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=rank.device)


def step(model, shard, rank):
    optimizer, scheduler = recipe.optimizer_and_scheduler(model.parameters())
    fsdp = wrap(model, rank)
    for rows in rows_of(shard, rank):
        loss(fsdp, rows).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


case = Case(model=recipe.model, batch=batch, loss=loss, layout="1x2", shards="own")
options = {
    "compare": "update",
    "optimizer": recipe.optimizer_and_scheduler,
    "steps": STEPS,
}
