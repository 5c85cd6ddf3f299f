"""Data parallelism with DTensor alone: parameters are replicated, and examples are sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn import functional as F

from ddp_equivalence import Case

CLASSES = 4


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 18), nn.ReLU(), nn.Linear(18, CLASSES))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    log_probabilities = F.log_softmax(model(batch["features"]), dim=-1)
    return -(log_probabilities * batch["targets"]).sum(dim=-1).mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(CLASSES, (12,), generator=generator)
    features = torch.randn(12, 7, generator=generator)
    features[:, :CLASSES] += F.one_hot(labels, CLASSES)
    smoothed = 0.9 * F.one_hot(labels, CLASSES) + 0.1 / CLASSES
    return {"features": features, "targets": smoothed}


class SpmdTrainer:
    """The program is written as for one device; the layout of the tensors does the rest."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.mesh: DeviceMesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
        # Without a partition function all parameters are replicated.
        self.model = distribute_module(model, self.mesh)

    def place(self, tensor: Tensor) -> DTensor:
        """The rank's examples as its part of the global batch."""
        return distribute_tensor(tensor, self.mesh, [Shard(0)])

    def backward(self, batch: dict[str, Tensor]) -> None:
        placed = {name: self.place(tensor) for name, tensor in batch.items()}
        loss(self.model, placed).backward()

    def finish_gradients(self) -> None:
        for parameter in self.model.parameters():
            # Partial sums become the same gradient everywhere.
            parameter.grad = parameter.grad.redistribute(self.mesh, [Replicate()])


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    trainer = SpmdTrainer(model, rank.world_size)
    trainer.backward(shard)
    trainer.finish_gradients()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
