"""One ranker for two surfaces of the app, with a shared trunk and a head for each surface.

Logs of a surface live on certain GPUs: "feed" on the first, "ads" on the others. Both surfaces
count equally, however many GPUs they have.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SURFACES = ("feed", "ads")
FEATURES, ROWS_PER_GPU = 9, 4

TRAINING = {
    "surfaces": {
        "feed": {"first_gpu": 0, "gpus": 1},
        "ads": {"first_gpu": 1, "gpus": 2},
    },
    "find_unused_parameters": True,
}


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(FEATURES, 24), nn.ReLU(), nn.LayerNorm(24), nn.Linear(24, 16), nn.ReLU()
        )
        self.heads = nn.ModuleDict({name: nn.Linear(16, 1) for name in SURFACES})

    def forward(self, features, surface):
        return self.heads[surface](self.trunk(features)).squeeze(-1)


def logged_events(generator):
    n = 4 * ROWS_PER_GPU
    surface = torch.ones(n, dtype=torch.long)
    surface[:ROWS_PER_GPU] = 0
    return {
        "surface": surface,
        "features": torch.randn(n, FEATURES, generator=generator),
        "clicked": (torch.rand(n, generator=generator) < 0.3).float(),
    }


def surface_loss(model, batch, name):
    rows = batch["surface"] == SURFACES.index(name)
    return bce(model(batch["features"][rows], name), batch["clicked"][rows])


def loss(model, batch):
    return sum(surface_loss(model, batch, name) for name in SURFACES)


case = Case(model=Ranker, batch=logged_events, loss=loss, layout="1+3")


class SurfacePlan:
    """Which surface is this GPU's, and how many GPUs share it?"""

    def __init__(self, config, rank, world_size):
        self.config, self.rank, self.world_size = config, rank, world_size

    def name(self):
        started = {n: s["first_gpu"] for n, s in self.config["surfaces"].items()}
        return max((n for n in started if started[n] <= self.rank), key=started.get)

    def weight(self):
        """DDP divides by all GPUs; the mean of a surface is over its own."""
        return self.world_size / self.config["surfaces"][self.name()]["gpus"]


class MultiDomainTrainer:
    def __init__(self, model, config, rank):
        self.plan = SurfacePlan(config, rank.rank, rank.world_size)
        self.ddp = DistributedDataParallel(
            model, find_unused_parameters=config["find_unused_parameters"]
        )

    def train_on(self, batch):
        value = surface_loss(self.ddp, batch, self.plan.name())
        (self.plan.weight() * value).backward()


def step(model, shard, rank):
    MultiDomainTrainer(model, TRAINING, rank).train_on(shard)
