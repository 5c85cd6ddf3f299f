"""Masked acoustic modelling, hybrid sharding: the loss is a sum over masked frames, and FSDP only sums.

No rank divides by its own number of frames. The divisor is that of all ranks, and the gradients are added up.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_equivalence import Case

FRAMES, MELS = 9, 5


class MaskedModel(nn.Module):
    def __init__(self, width: int = 11) -> None:
        super().__init__()
        self.blank = nn.Parameter(torch.randn(MELS))
        self.encoder = nn.Sequential(
            nn.Conv1d(MELS, width, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv1d(width, width, kernel_size=3, padding=1),
            nn.GELU(),
        )
        self.restore = nn.Linear(width, MELS)

    def forward(self, mels: Tensor, masked: Tensor) -> Tensor:
        seen = torch.where(masked.unsqueeze(-1), self.blank, mels)
        return self.restore(self.encoder(seen.transpose(1, 2)).transpose(1, 2))


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Summed over the frames that the model did not see."""
    distance = (model(batch["mels"], batch["masked"]) - batch["mels"]).abs().mean(dim=-1)
    return distance[batch["masked"]].sum()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return error(model, batch) / batch["masked"].sum()


def recordings(generator: torch.Generator) -> dict[str, Tensor]:
    rate = torch.rand(12, 1, generator=generator)
    masked = torch.rand(12, FRAMES, generator=generator) < rate
    masked[:, 0] = True
    return {"mels": torch.randn(12, FRAMES, MELS, generator=generator), "masked": masked}


def hybrid(model: MaskedModel, nodes: int, per_node: int) -> FSDPModule:
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.encoder, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def step(model, shard, rank):
    sharded = hybrid(model, rank.nodes, rank.local_world_size)
    frames = shard["masked"].sum()
    dist.all_reduce(frames)
    (error(sharded, shard) / frames).backward()


case = Case(model=MaskedModel, batch=recordings, loss=loss, layout="2x2")
