"""ZeRO-2 (SHARD_GRAD_OP) with flat parameters, three micro-batches a step, and Adam."""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.functional import smooth_l1_loss

from ddp_equivalence import Case

FEATURES, OUTPUTS = 9, 4
MICRO_BATCHES, MICRO_ROWS = 3, 4
LARGEST_NORM = 0.2


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 13), nn.SiLU(), nn.Linear(13, 13))
        self.scale = nn.Parameter(torch.ones(13))
        self.decoder = nn.Linear(13, OUTPUTS, bias=False)

    def forward(self, x):
        return self.decoder(self.scale * self.encoder(x).tanh())


def adam(parameters):
    # A large eps, so that rounding in tiny gradients cannot decide the sign of a step.
    return torch.optim.Adam(parameters, lr=3e-2, betas=(0.8, 0.95), eps=1e-2)


def batch(generator):
    rows = 2 * MICRO_BATCHES * MICRO_ROWS
    x = torch.randn(rows, FEATURES, generator=generator)
    noise = torch.randn(rows, OUTPUTS, generator=generator)
    return {"x": x, "y": x[:, :OUTPUTS] * x[:, OUTPUTS : 2 * OUTPUTS] + 0.3 * noise}


def loss(model, batch):
    return smooth_l1_loss(model(batch["x"]), batch["y"], beta=0.5)


def micro_batches(shard):
    """Yields (micro-batch, whether it is the last one of the step)."""
    xs, ys = shard["x"].split(MICRO_ROWS), shard["y"].split(MICRO_ROWS)
    for number, (x, y) in enumerate(zip(xs, ys, strict=True), start=1):
        yield {"x": x, "y": y}, number == len(xs)


def step(model, shard, rank):
    model.encoder = FullyShardedDataParallel(
        model.encoder,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=rank.device,
    )
    fsdp = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=rank.device,
        forward_prefetch=False,
        limit_all_gathers=True,
    )
    optimizer = adam(fsdp.parameters())
    optimizer.zero_grad()
    for micro_batch, is_last in micro_batches(shard):
        # Without communication the gradients stay whole on every rank until the last micro-batch.
        with contextlib.nullcontext() if is_last else fsdp.no_sync():
            (loss(fsdp, micro_batch) / MICRO_BATCHES).backward()
    norm = fsdp.clip_grad_norm_(LARGEST_NORM)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm {norm} on rank {rank.rank}")
    optimizer.step()


case = Case(model=Regressor, batch=batch, loss=loss, layout="1x2", dtype=torch.float32)
options = {"compare": "update", "optimizer": adam, "clip": LARGEST_NORM}
