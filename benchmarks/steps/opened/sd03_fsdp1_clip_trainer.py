"""FSDP trainer with callbacks, momentum SGD and gradient clipping."""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class TrainingArguments:
    learning_rate: float = 0.05
    max_grad_norm: float = 0.1
    num_steps: int = 2
    sharding_strategy: str = "FULL_SHARD"


ARGS = TrainingArguments()


class MLPBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Regressor(nn.Module):
    def __init__(self, dim=8, depth=2):
        super().__init__()
        self.stem = nn.Linear(5, dim)
        self.blocks = nn.Sequential(*(MLPBlock(dim) for _ in range(depth)))
        self.head = nn.Linear(dim, 2)

    def forward(self, x):
        return self.head(self.blocks(torch.tanh(self.stem(x))))


class Callback:
    def on_backward_end(self, trainer): ...

    def on_step_end(self, trainer): ...


class GradientClipping(Callback):
    def __init__(self, max_norm):
        self.max_norm = max_norm

    def on_backward_end(self, trainer):
        parameters = [p for p in trainer.model.parameters() if p.grad is not None]
        trainer.log["grad_norm"] = nn.utils.clip_grad_norm_(parameters, self.max_norm)


class ZeroGrad(Callback):
    def on_step_end(self, trainer):
        trainer.optimizer.zero_grad(set_to_none=True)


class FSDPTrainer:
    def __init__(self, model, args, build_optimizer, callbacks):
        self.args = args
        self.log = {}
        self.model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({MLPBlock}),
            sharding_strategy=ShardingStrategy[args.sharding_strategy],
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        self.optimizer = build_optimizer(self.model.parameters())
        self.callbacks = callbacks

    def fire(self, event):
        for callback in self.callbacks:
            getattr(callback, event)(self)

    def train(self, batch):
        size = len(batch["x"]) // self.args.num_steps
        for rows in zip(*(v.split(size) for v in batch.values())):
            F.mse_loss(self.model(rows[0]), rows[1]).backward()
            self.fire("on_backward_end")
            self.optimizer.step()
            self.fire("on_step_end")

    def full_weights(self):
        with FSDP.summon_full_params(self.model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in self.model.named_parameters()
            }


make_optimizer = functools.partial(torch.optim.SGD, lr=ARGS.learning_rate, momentum=0.9)


def make_batch(generator):
    x = torch.randn(16, 5, generator=generator)
    return {"x": x, "y": 2 * torch.randn(16, 2, generator=generator)}


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def step(model, shard, rank):
    callbacks = [GradientClipping(ARGS.max_grad_norm), ZeroGrad()]
    trainer = FSDPTrainer(model, ARGS, make_optimizer, callbacks)
    trainer.train(shard)
    return trainer.full_weights()


case = Case(
    model=Regressor, batch=make_batch, loss=loss, layout="1x2", dtype=torch.float32
)
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "steps": ARGS.num_steps,
    "clip": ARGS.max_grad_norm,
}
