"""Mixed precision with a loss scale, as one trains in half precision; here it stays in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

MAX_NORM, STEPS, MICRO_BATCHES = 0.5, 2, 2


class StaticScaler:
    def __init__(self, scale: float = 2.0**10) -> None:
        self.scale = scale

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.scale

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.action, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        features = self.shared(states)
        return self.action(features), self.value(features).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, values = model(batch["states"])
    advantages = batch["returns"] - values.detach()
    chosen = F.log_softmax(logits, dim=-1).gather(1, batch["actions"][:, None]).squeeze(1)
    return -(chosen * advantages).mean() + F.mse_loss(values, batch["returns"])


def rollouts(generator: torch.Generator) -> dict[str, Tensor]:
    states = torch.randn(16 * STEPS, 6, generator=generator)
    return {
        "states": states,
        "actions": torch.randint(3, (16 * STEPS,), generator=generator),
        "returns": 3 * states[:, 0] + states[:, 1],
    }


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    optimizer, scaler = make_optimizer(model.parameters()), StaticScaler()
    for batch in batches:
        parts = [tensor.chunk(MICRO_BATCHES) for tensor in batch.values()]
        for number, micro in enumerate(zip(*parts), 1):
            model.set_requires_gradient_sync(number == MICRO_BATCHES)
            scaler(loss(model, dict(zip(batch, micro))) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.unscale_(optimizer)
        optimizer.step()
        optimizer.zero_grad()


def step(model: Policy, shard: dict[str, Tensor], rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(model.shared, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    parts = [tensor.chunk(STEPS) for tensor in shard.values()]
    train(model, [dict(zip(shard, values)) for values in zip(*parts)])


case = Case(model=Policy, batch=rollouts, loss=loss, layout="1x2", dtype=torch.float32)
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS}
