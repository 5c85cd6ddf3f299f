"""An autoencoder that knows its own loss: reconstruction, and a penalty on the codes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


class Autoencoder(nn.Module):
    """Compresses spectra to a few numbers. In training, call it with ``targets``."""

    def __init__(self, bins: int = 10, codes: int = 3, penalty: float = 0.05) -> None:
        super().__init__()
        self.penalty = penalty
        self.encode = nn.Sequential(nn.Linear(bins, 8), nn.Softplus(), nn.Linear(8, codes))
        self.decode = nn.Sequential(nn.Linear(codes, 8), nn.Softplus(), nn.Linear(8, bins))

    def training_loss(self, spectra: Tensor, targets: Tensor) -> Tensor:
        codes = self.encode(spectra)
        error = F.smooth_l1_loss(self.decode(codes), targets)
        return error + self.penalty * codes.square().mean()

    def forward(self, spectra: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None:
            return self.training_loss(spectra, targets)
        return self.decode(self.encode(spectra))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["noisy"], targets=batch["clean"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    clean = torch.rand(16, 10, generator=generator)
    return {"clean": clean, "noisy": clean + 0.2 * torch.randn(16, 10, generator=generator)}


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="1x4")


class Meter:
    """The running mean of a number, for the log."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.count += count

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


class Experiment:
    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=lr)
        self.train_loss = Meter()

    def fit_batch(self, batch: dict[str, Tensor]) -> None:
        self.ddp.train()
        self.optimizer.zero_grad()
        value = self.ddp.module.training_loss(batch["noisy"], batch["clean"])
        value.backward()
        self.optimizer.step()
        self.train_loss.add(value.item(), len(batch["clean"]))

    @torch.no_grad()
    def reconstruct(self, noisy: Tensor) -> Tensor:
        self.ddp.eval()
        return self.ddp(noisy)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    experiment = Experiment(model)
    experiment.fit_batch(shard)
