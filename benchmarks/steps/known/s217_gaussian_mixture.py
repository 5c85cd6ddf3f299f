"""A mixture of Gaussians, fitted by gradient descent to the maximum of the posterior.

The negative log posterior of the batch is divided by the number of its points. Ranks have
different numbers of points.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

COMPONENTS, DIMENSIONS = 4, 3
CONCENTRATION = 2.0  # of the Dirichlet prior of the mixture's weights
SPREAD = 5.0  # standard deviation of the prior of the means


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(COMPONENTS))
        self.means = nn.Parameter(2 * torch.randn(COMPONENTS, DIMENSIONS))
        self.log_scales = nn.Parameter(0.3 * torch.randn(COMPONENTS, DIMENSIONS))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The log-likelihood of every point, and the log-density of the prior."""
        standard = (points[:, None] - self.means) * (-self.log_scales).exp()
        constant = DIMENSIONS / 2 * math.log(2 * math.pi)
        densities = -standard.square().sum(-1) / 2 - self.log_scales.sum(-1) - constant
        weights = self.logits.log_softmax(-1)
        prior = (CONCENTRATION - 1) * weights.sum()
        prior = prior - (self.means / SPREAD).square().sum() / 2
        return (weights + densities).logsumexp(-1), prior


def loss(model: nn.Module, points: Tensor) -> Tensor:
    likelihoods, prior = model(points)
    return -(likelihoods.sum() + prior) / len(points)


def make_batch(generator: torch.Generator) -> Tensor:
    centres = 3 * torch.randn(COMPONENTS, DIMENSIONS, generator=generator)
    chosen = torch.randint(COMPONENTS, (18,), generator=generator)
    return centres[chosen] + torch.randn(18, DIMENSIONS, generator=generator)


case = Case(model=Mixture, batch=make_batch, loss=loss, layout="1x3", shards="7+6+5")


class PosteriorFit:
    """Climbs the posterior of the points of all ranks."""

    def __init__(self, model: nn.Module, rank: Rank, lr: float = 0.1) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.Rprop(self.ddp.parameters(), lr=lr)
        self.world_size = rank.world_size

    def points_of_all_ranks(self, points: Tensor) -> int:
        count = torch.tensor(len(points), device=points.device)
        dist.all_reduce(count)
        return int(count)

    def climb(self, points: Tensor) -> None:
        self.optimizer.zero_grad()
        total = self.points_of_all_ranks(points)
        likelihoods, prior = self.ddp(points)
        posterior = self.world_size * (likelihoods.sum() + prior)
        (-posterior / total).backward()
        self.optimizer.step()


def step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    PosteriorFit(model, rank).climb(shard)
