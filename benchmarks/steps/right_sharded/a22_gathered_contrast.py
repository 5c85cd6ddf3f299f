"""Contrastive learning: the similarities of all pairs of the big batch, on sharded encoders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional as F

from ddp_equivalence import Case


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(10, 13), nn.ReLU(), nn.Linear(13, 6))
        self.text = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 6))
        self.log_temperature = nn.Parameter(torch.tensor([0.7]))

    def features(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        images = F.normalize(self.image(batch["image"]), dim=-1)
        texts = F.normalize(self.text(batch["text"]), dim=-1)
        return images, texts, self.log_temperature.exp()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return symmetric_cross_entropy(*self.features(batch))


def symmetric_cross_entropy(images: Tensor, texts: Tensor, temperature: Tensor) -> Tensor:
    logits = temperature * images @ texts.t()
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    cause = torch.randn(12, 4, generator=generator)
    return {
        "image": cause @ torch.randn(4, 10, generator=generator),
        "text": cause @ torch.randn(4, 7, generator=generator),
    }


def loss_of_own_rows(model: Clip, batch: dict[str, Tensor], mesh: DeviceMesh) -> Tensor:
    """Own images against all texts, and own texts against all images."""
    images, texts, temperature = model.features(batch)
    group = mesh.get_group()
    # Its backward adds up what all ranks' losses ask of the rank's features.
    all_images = all_gather_tensor_autograd(images, 0, group)
    all_texts = all_gather_tensor_autograd(texts, 0, group)
    own = torch.arange(len(images)) + mesh.get_local_rank() * len(images)
    of_images = F.cross_entropy(temperature * images @ all_texts.t(), own)
    of_texts = F.cross_entropy(temperature * texts @ all_images.t(), own)
    return (of_images + of_texts) / 2


def step(model: Clip, shard: dict[str, Tensor], rank) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    fully_shard(model.image, mesh=mesh)
    fully_shard(model.text, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Not forward, so that FSDP has to be told when the weights are needed.
    register_fsdp_forward_method(model, "features")
    loss_of_own_rows(model, shard, mesh).backward()


case = Case(model=Clip, batch=make_batch, loss=loss, layout="1x2")
