"""An autoencoder. A running average of the gradients is kept beside, for the dashboard."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


class Autoencoder(nn.Module):
    def __init__(self, inputs: int = 9, code: int = 4) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(inputs, 7), nn.ELU(), nn.Linear(7, code))
        self.decode = nn.Sequential(nn.Linear(code, 7), nn.ELU(), nn.Linear(7, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.smooth_l1_loss(model(batch), batch)


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(16, 9, generator=generator)


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="2x1")


class GradientStatistics:
    """Running averages by name, of which the norms are drawn."""

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            average = self.averages.setdefault(name, parameter.grad)
            average.mul_(self.decay).add_(parameter.grad, alpha=1 - self.decay)

    def norms(self) -> dict[str, float]:
        return {name: average.norm().item() for name, average in self.averages.items()}


class Loop:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = model
        self.world_size = world_size
        self.statistics = GradientStatistics()
        self.log: list[dict[str, float]] = []

    def synchronize(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.world_size
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, piece in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(piece.reshape(gradient.shape))

    def train_on(self, batch: Tensor) -> float:
        self.model.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.synchronize()
        self.statistics.update(self.model)
        self.log.append(self.statistics.norms())
        return value.item()


def step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    Loop(model, rank.world_size).train_on(shard)
