"""float32 weights, but the forward pass and the reduction of the gradients in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


class Gate(nn.Module):
    """A unit of its own: it has another policy than the rest."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).softmax(dim=-1)


class SoftMixture(nn.Module):
    def __init__(self, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.gate = Gate(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 10), nn.Mish(), nn.Linear(10, 2))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * self.gate(x).to(outputs.dtype)[:, None]).sum(dim=-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.huber_loss(model(batch["x"]).float(), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "y": torch.where(x[:, :1] > 0, x[:, 1:3], x[:, 3:5].square())}


PRECISE = MixedPrecisionPolicy(
    param_dtype=torch.float64,
    reduce_dtype=torch.float64,
    output_dtype=torch.float32,
)
ONLY_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.float64, cast_forward_inputs=True)


def apply(model: SoftMixture) -> FSDPModule:
    fully_shard(model.gate, mp_policy=ONLY_REDUCE)
    for expert in model.experts:
        fully_shard(expert, mp_policy=PRECISE)
    return fully_shard(model, mp_policy=ONLY_REDUCE)


def step(model: SoftMixture, shard: dict[str, Tensor], rank) -> None:
    sharded = apply(model)
    value = loss(sharded, shard)
    assert value.dtype == torch.float32
    value.backward()


case = Case(model=SoftMixture, batch=make_batch, loss=loss, layout="1x2", dtype=torch.float32)
