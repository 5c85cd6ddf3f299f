"""Face attributes: identity, age and pose heads on one trunk, the tasks weighted by their current share of the loss
(larger losses get larger weights, without gradient through the weights). Gradients are averaged by DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

IDENTITIES = 7
SHARPNESS = 1.5


class Attributes(nn.Module):
    def __init__(self, dim=18, hidden=28):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.identity = nn.Linear(hidden, IDENTITIES)
        self.age = nn.Linear(hidden, 1)
        self.pose = nn.Linear(hidden, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.identity(h), self.age(h).squeeze(-1), self.pose(h)


def build_model():
    return Attributes()


def make_batch(generator):
    n = 16
    age = torch.linspace(-2, 1, n) + 0.3 * torch.randn(n, generator=generator)
    return {
        "x": torch.randn(n, 18, generator=generator),
        "identity": torch.randint(0, IDENTITIES, (n,), generator=generator),
        "age": age,
        "pose": 0.8 * torch.randn(n, 3, generator=generator),
    }


def losses_per_task(out, batch):
    identity, age, pose = out
    return torch.stack([
        F.cross_entropy(identity, batch["identity"]),
        F.huber_loss(age, batch["age"], delta=0.5),
        F.mse_loss(pose, batch["pose"]),
    ])


def share_weights(values):
    """Weights that sum to the number of tasks, from detached loss values."""
    return len(values) * torch.softmax(SHARPNESS * values, dim=0)


def loss(model, batch):
    losses = losses_per_task(model(batch["x"]), batch)
    return (share_weights(losses.detach()) * losses).sum()


class Meter:
    def __init__(self):
        self.values = []

    def update(self, losses, world_size):
        mean = losses.detach().clone()
        dist.all_reduce(mean)
        mean /= world_size
        self.values.append(mean)
        return mean


class LossBalancer:
    def __init__(self, world_size):
        self.world_size = world_size
        self.meter = Meter()

    def __call__(self, losses):
        mean = self.meter.update(losses, self.world_size)
        if not torch.isfinite(mean).all():
            raise FloatingPointError(f"loss is {mean.tolist()}")
        weights = share_weights(losses.detach())
        return (weights * losses).sum()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    balancer = LossBalancer(rank.world_size)
    losses = losses_per_task(ddp(shard["x"]), shard)
    balancer(losses).backward()
