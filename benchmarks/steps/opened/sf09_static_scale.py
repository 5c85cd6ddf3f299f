"""A speech enhancer with a fixed loss scale, sharded with a mixed-precision policy, gradients clipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case

BINS, FRAMES = 9, 7
SETTINGS = {"lr": 0.5, "momentum": 0.9, "max_norm": 0.05, "loss_scale": 512.0, "steps": 2}


class Enhancer(nn.Module):
    """Predicts a mask for a noisy spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(BINS, 10, batch_first=True)
        self.mask = nn.Sequential(nn.Linear(10, 15), nn.ReLU(), nn.Linear(15, BINS))

    def forward(self, noisy: Tensor) -> Tensor:
        hidden, _ = self.rnn(noisy)
        return torch.sigmoid(self.mask(hidden)) * noisy


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["noisy"]) - batch["clean"]).square().mean()


def spectrograms(generator: torch.Generator) -> dict[str, Tensor]:
    shape = (8 * SETTINGS["steps"], FRAMES, BINS)
    clean = torch.randn(shape, generator=generator).abs()
    return {"noisy": clean + 0.5 * torch.randn(shape, generator=generator).abs(), "clean": clean}


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=SETTINGS["lr"], momentum=SETTINGS["momentum"])


class LossScale:
    """The scale never changes: these losses are small but tame."""

    def __init__(self, scale: float) -> None:
        self.scale_ = scale

    def scale(self, value: Tensor) -> Tensor:
        return value * self.scale_

    @torch.no_grad()
    def unscale(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale_)


def shard_model(model: Enhancer) -> Enhancer:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    fully_shard(model.mask, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScale) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_norm"])
    scaler.unscale(model)
    optimizer.step()


def step(model, shard, rank):
    model = shard_model(model)
    optimizer = make_optimizer(model.parameters())
    scaler = LossScale(SETTINGS["loss_scale"])
    size = len(shard["clean"]) // SETTINGS["steps"]
    for start in range(0, len(shard["clean"]), size):
        part = {name: value[start : start + size] for name, value in shard.items()}
        optimizer.zero_grad()
        scaler.scale(loss(model, part)).backward()
        optimizer_step(model, optimizer, scaler)


case = Case(model=Enhancer, batch=spectrograms, loss=loss, layout="1x2", dtype=torch.float32)
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "clip": SETTINGS["max_norm"],
    "steps": SETTINGS["steps"],
}
