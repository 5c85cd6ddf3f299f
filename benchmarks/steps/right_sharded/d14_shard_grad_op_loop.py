"""FSDP strategy with SHARD_GRAD_OP, accumulation without communication, and clipping."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.functional import smooth_l1_loss

from ddp_equivalence import Case


@dataclass(frozen=True)
class LoopConfig:
    accumulate: int = 2
    steps: int = 3
    clip: float = 0.05
    lr: float = 0.03


LOOP = LoopConfig()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(3, 7, batch_first=True)
        self.project = nn.Sequential(nn.Linear(7, 11), nn.ELU(), nn.Linear(11, 4))

    def forward(self, series):
        states, _ = self.recurrent(series)
        return self.project(states[:, -1])


def adamw(parameters):
    # a large eps, so that tiny gradients do not make steps of full size
    return torch.optim.AdamW(parameters, lr=LOOP.lr, eps=1e-2, weight_decay=0.02)


class FSDPStrategy:
    wrapper = dict(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )

    def wrap(self, model):
        model.project = FullyShardedDataParallel(model.project, **self.wrapper)
        return FullyShardedDataParallel(model, **self.wrapper)

    @contextlib.contextmanager
    def block_backward_sync(self, module, enabled):
        with module.no_sync() if enabled else contextlib.nullcontext():
            yield

    def clip_gradients_norm(self, module, max_norm):
        return module.clip_grad_norm_(max_norm)


class FitLoop:
    def __init__(self, model, strategy, config=LOOP):
        self.strategy, self.config = strategy, config
        self.module = strategy.wrap(model)
        self.optimizer = adamw(self.module.parameters())

    def micro_batches(self, batch):
        count = self.config.steps * self.config.accumulate
        yield from zip(batch["series"].chunk(count), batch["future"].chunk(count))

    def run(self, batch):
        for index, (series, future) in enumerate(self.micro_batches(batch)):
            accumulating = (index + 1) % self.config.accumulate != 0
            with self.strategy.block_backward_sync(self.module, enabled=accumulating):
                value = smooth_l1_loss(self.module(series), future)
                (value / self.config.accumulate).backward()
            if accumulating:
                continue
            self.strategy.clip_gradients_norm(self.module, self.config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def consolidated(module):
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in module.named_parameters()
        }


def make_batch(generator):
    series = torch.randn(24, 8, 3, generator=generator).cumsum(1)
    return {"series": series, "future": torch.randn(24, 4, generator=generator) + series[:, -1:, 0]}


def loss(model, batch):
    return smooth_l1_loss(model(batch["series"]), batch["future"])


def step(model, shard, rank):
    fit = FitLoop(model, FSDPStrategy())
    fit.run(shard)
    return consolidated(fit.module)


case = Case(
    model=Forecaster, batch=make_batch, loss=loss, layout="1x2", dtype=torch.float32
)
options = {"compare": "update", "optimizer": adamw, "steps": LOOP.steps, "clip": LOOP.clip}
