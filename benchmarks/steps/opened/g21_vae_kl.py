"""A VAE whose two terms are normalised by a helper that knows about the global batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

PIXELS, LATENT, BETA = 10, 3, 0.7


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(PIXELS, 12), nn.ELU())
        self.mu = nn.Linear(12, LATENT)
        self.logvar = nn.Linear(12, LATENT)
        self.dec = nn.Sequential(nn.Linear(LATENT, 12), nn.ELU(), nn.Linear(12, PIXELS))

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.dec(mu + eps * (logvar / 2).exp()), mu, logvar


def digits(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.rand(12, PIXELS, generator=generator),
        "eps": torch.randn(12, LATENT, generator=generator),
    }


def kl(mu: Tensor, logvar: Tensor) -> Tensor:
    return 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum()


def reconstruction(logits: Tensor, x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, x, reduction="sum")


def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    logits, mu, logvar = model(b["x"], b["eps"])
    return (reconstruction(logits, b["x"]) + BETA * kl(mu, logvar)) / len(b["x"])


case = Case(model=VAE, batch=digits, loss=loss, layout="1x3")


class Normaliser:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        n = torch.tensor(rows)
        dist.all_reduce(n)
        self.everyone = int(n)

    def per_example(self, total: Tensor, averaged_later: bool = False) -> Tensor:
        """Per example of the global batch; ``averaged_later`` if DDP still divides by the ranks."""
        if averaged_later:
            return total * dist.get_world_size() / self.everyone
        return total / self.everyone


class Elbo:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)

    def terms(self, b: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = Normaliser(len(b["x"]))
        logits, mu, logvar = self.ddp(b["x"], b["eps"])
        return {
            "rec": norm.per_example(reconstruction(logits, b["x"]), averaged_later=True),
            "kl": norm.per_example(BETA * kl(mu, logvar)),
        }


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    elbo = Elbo(model)
    terms = elbo.terms(shard)
    sum(terms.values()).backward()
