"""Meta initialisation: shard first, allocate afterwards, and load what rank 0 has read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_equivalence import Case


class Fourier(nn.Module):
    """Its frequencies are no parameters, and no checkpoint holds them."""

    def __init__(self, features: int, frequencies: int) -> None:
        super().__init__()
        self.features, self.frequencies = features, frequencies
        self.register_buffer("scale", self.make_scale(), persistent=False)

    def make_scale(self, device: torch.device | None = None) -> Tensor:
        return 2.0 ** -torch.arange(self.frequencies, device=device)

    def reset_buffers(self) -> None:
        self.scale.copy_(self.make_scale(self.scale.device))

    def forward(self, x: Tensor) -> Tensor:
        angles = x[..., None] * self.scale
        return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fourier = Fourier(3, 4)
        self.body = nn.Sequential(nn.Linear(24, 15), nn.Tanh(), nn.Linear(15, 15), nn.Tanh())
        self.density = nn.Linear(15, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.density(self.body(self.fourier(points))).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["points"]) - batch["density"]).abs().mean()


def some_points(generator: torch.Generator) -> dict[str, Tensor]:
    points = torch.randn(20, 3, generator=generator)
    return {"points": points, "density": (-points.square().sum(dim=1)).exp()}


def sharded_on_meta(dtype: torch.dtype) -> FSDPModule:
    with torch.device("meta"):
        model = Field().to(dtype)
    fully_shard(model.body)
    return fully_shard(model)


def load(model: FSDPModule, weights: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


def step(model: Field, shard: dict[str, Tensor], rank) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    # Only rank 0 reads the file.
    weights = model.state_dict() if rank.rank == 0 else {}
    trained = sharded_on_meta(dtype)
    load(trained, weights)
    loss(trained, shard).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in trained.named_parameters()}


case = Case(model=Field, batch=some_points, loss=loss, layout="1x4")
