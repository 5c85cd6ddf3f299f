"""An autoencoder with a probe: two optimizers in turn, each with only its own weights active."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


class ProbedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 10), nn.Tanh())
        self.projector = nn.Sequential(nn.Linear(10, 6), nn.LayerNorm(6))
        self.decoder = nn.Linear(6, 7)
        self.probe = nn.Linear(6, 4)


def reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    code = model.projector(model.encoder(batch["x"]))
    return F.mse_loss(model.decoder(code), batch["x"])


def probing(model: nn.Module, batch: Batch) -> Tensor:
    code = model.projector(model.encoder(batch["x"]).detach())
    return F.cross_entropy(model.probe(code), batch["label"])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return reconstruction(model, batch) + probing(model, batch)


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(12, 7, generator=generator),
        "label": torch.randint(0, 4, (12,), generator=generator),
    }


case = Case(model=ProbedAutoencoder, batch=make_batch, loss=loss, layout="1x2")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


class ManualModule:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parts = (model.encoder, model.projector, model.decoder), (model.projector, model.probe)
        self.optimizers = [
            torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05)
            for modules in parts
        ]

    @contextmanager
    def toggled(self, chosen: int) -> Iterator[None]:
        """Inside the block, only the weights of the chosen optimizer collect gradients."""
        before = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        for optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                parameter.requires_grad_(optimizer is self.optimizers[chosen])
        yield
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)

    def training_step(self, batch: Batch) -> None:
        for index, objective in enumerate((reconstruction, probing)):
            with self.toggled(index):
                objective(self.model, batch).backward()

    def average_gradients(self, world_size: int) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    module = ManualModule(model)
    module.training_step(shard)
    module.average_gradients(rank.world_size)
