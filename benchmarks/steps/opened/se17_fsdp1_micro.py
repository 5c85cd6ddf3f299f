"""FSDP1 with micro-batches of a fixed size; the last micro-batch of a step may be smaller."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case

MICRO_BATCH_SIZE = 4
LR = 0.1


class ConvBlock(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels_out)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class SignalClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(ConvBlock(2, 6), ConvBlock(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, signal):
        return self.head(self.features(signal).mean(-1))


def batch(generator):
    return {
        "signal": torch.randn(20, 2, 12, generator=generator),
        "label": torch.randint(0, 3, (20,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["signal"]), batch["label"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def micro_batches(data):
    signals, labels = (data[k].split(MICRO_BATCH_SIZE) for k in ("signal", "label"))
    return [{"signal": s, "label": y} for s, y in zip(signals, labels)]


class LegacyTrainer:
    def __init__(self, model):
        self.fsdp = FSDP(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({ConvBlock}),
            device_id=torch.device("cpu"),
            use_orig_params=False,
        )
        self.optimizer = make_optimizer(self.fsdp.parameters())

    def forward_backward(self, data):
        micros = micro_batches(data)
        for i, micro in enumerate(micros):
            last = i + 1 == len(micros)
            context = contextlib.nullcontext() if last else self.fsdp.no_sync()
            with context:
                value = loss(self.fsdp, micro)
                (value / len(micros)).backward()

    def train_step(self, data):
        self.optimizer.zero_grad()
        self.forward_backward(data)
        self.optimizer.step()

    def full_weights(self):
        with FSDP.summon_full_params(self.fsdp, writeback=False):
            named = self.fsdp.named_parameters()
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in named}


def step(model, shard, rank):
    trainer = LegacyTrainer(model)
    trainer.train_step(shard)
    return trainer.full_weights()


case = Case(model=SignalClassifier, batch=batch, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer}
