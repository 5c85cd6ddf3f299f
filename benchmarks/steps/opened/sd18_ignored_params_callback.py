"""FSDP2 with biases, gains and other small parameters kept whole: a callback averages those."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class ShardingConfig:
    min_shard_numel: int = 32
    reshard_after_forward: bool = True


class Adapter(nn.Module):
    def __init__(self, dim, bottleneck):
        super().__init__()
        self.down = nn.Linear(dim, bottleneck)
        self.up = nn.Linear(bottleneck, dim)
        self.gain = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        return x + self.gain * self.up(torch.tanh(self.down(x)))


class AdaptedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 12)
        self.adapters = nn.ModuleList(Adapter(12, width) for width in (2, 5))
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.inp(x))
        for adapter in self.adapters:
            x = adapter(x)
        return self.out(self.norm(x))


class Callback:
    def on_before_backward(self, trainer): ...

    def on_after_backward(self, trainer): ...


class AverageReplicated(Callback):
    """Averages the gradients of what fully_shard leaves alone, in one flat message."""

    def on_after_backward(self, trainer):
        whole = [p for p in trainer.replicated if p.ndim == 1]
        flat = torch.cat([p.grad.flatten() for p in whole])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, piece in zip(whole, flat.split([p.numel() for p in whole])):
            p.grad.copy_(piece.view_as(p))


class LossLogger(Callback):
    def __init__(self):
        self.losses = []

    def on_before_backward(self, trainer):
        self.losses.append(trainer.last_loss.item())


class ShardedTrainer:
    def __init__(self, model, config: ShardingConfig, callbacks):
        self.config = config
        self.callbacks = callbacks
        self.replicated = [p for p in model.parameters() if p.numel() < config.min_shard_numel]
        arguments = dict(
            ignored_params=set(self.replicated),
            reshard_after_forward=config.reshard_after_forward,
        )
        for adapter in model.adapters:
            fully_shard(adapter, **arguments)
        self.model = fully_shard(model, **arguments)

    def call(self, hook):
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def training_step(self, batch):
        value = loss(self.model, batch)
        self.last_loss = value.detach()
        self.call("on_before_backward")
        value.backward()
        self.call("on_after_backward")


def make_batch(generator):
    return {
        "x": torch.randn(12, 6, generator=generator),
        "label": torch.randint(0, 5, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


def step(model, shard, rank):
    trainer = ShardedTrainer(model, ShardingConfig(), [LossLogger(), AverageReplicated()])
    trainer.training_step(shard)


case = Case(model=AdaptedModel, batch=make_batch, loss=loss, layout="1x2")
