"""The old FSDP1 trainer: config, wrap policy, clipping, AdamW."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    lr: float = 0.05
    momentum: float = 0.9
    max_norm: float = 0.1
    steps: int = 2
    features: int = 9
    width: int = 14


CFG = Config()


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.inp = nn.Linear(cfg.features, cfg.width)
        self.layers = nn.Sequential(Layer(cfg.width), Layer(cfg.width))
        self.out = nn.Linear(cfg.width, 2)

    def forward(self, x):
        return self.out(self.layers(self.inp(x)))


def batch(generator):
    x = torch.randn(16 * CFG.steps, CFG.features, generator=generator)
    return {"x": x, "y": torch.stack([x.sum(1), x.prod(1)], 1)}


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=CFG.lr, momentum=CFG.momentum)


class Trainer:
    def __init__(self, model, cfg=CFG):
        self.cfg = cfg
        self.model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        self.optimizer = make_optimizer(self.model.parameters())

    def train_step(self, data):
        self.optimizer.zero_grad(set_to_none=True)
        value = loss(self.model, data)
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.optimizer.step()
        return value.detach()

    def weights(self):
        with FSDP.summon_full_params(self.model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in self.model.named_parameters()
            }


def step(model, shard, rank):
    trainer = Trainer(model)
    xs, ys = (shard[key].chunk(CFG.steps) for key in ("x", "y"))
    for x, y in zip(xs, ys):
        trainer.train_step({"x": x, "y": y})
    return trainer.weights()


case = Case(model=Net, batch=batch, loss=loss, layout="1x2", dtype=torch.float32)
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "clip": CFG.max_norm,
    "steps": CFG.steps,
}
