"""Dense multi-task learning (depth, normals, segmentation) with homoscedastic uncertainty weights: one learned
log-variance per task beside the network. The network runs under DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

TASKS = ("depth", "normal", "segment")
SEGMENTS = 4


class SharedNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        )
        self.heads = nn.ModuleDict({
            "depth": nn.Conv2d(width, 1, 1),
            "normal": nn.Conv2d(width, 3, 1),
            "segment": nn.Conv2d(width, SEGMENTS, 1),
        })

    def forward(self, image):
        shared = self.encoder(image)
        return {task: head(shared) for task, head in self.heads.items()}


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = SharedNet()
        self.log_vars = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def combine(self, losses):
        stacked = torch.stack([losses[task] for task in TASKS])
        return (torch.exp(-self.log_vars) * stacked + 0.5 * self.log_vars).sum()


def build_model():
    return MultiTask()


def make_batch(generator):
    n = 12
    ramp = torch.linspace(0.2, 2.0, n)[:, None, None, None]
    return {
        "image": torch.randn(n, 3, 6, 6, generator=generator),
        "depth": ramp * torch.rand(n, 1, 6, 6, generator=generator),
        "normal": F.normalize(torch.randn(n, 3, 6, 6, generator=generator), dim=1),
        "segment": torch.randint(0, SEGMENTS, (n, 6, 6), generator=generator),
    }


def task_losses(out, batch):
    cosine = F.cosine_similarity(out["normal"], batch["normal"], dim=1)
    return {
        "depth": F.l1_loss(out["depth"], batch["depth"]),
        "normal": (1 - cosine).mean(),
        "segment": F.cross_entropy(out["segment"], batch["segment"]),
    }


def loss(model, batch):
    return model.combine(task_losses(model.net(batch["image"]), batch))


class Trainer:
    def __init__(self, model, rank):
        self.model = model
        self.rank = rank
        self.net = DDP(model.net)
        self.history = {}

    def log(self, losses):
        values = torch.stack([losses[task].detach() for task in TASKS])
        dist.all_reduce(values)
        values /= self.rank.world_size
        self.history = dict(zip(TASKS, values.tolist()))

    def backward(self, shard):
        losses = task_losses(self.net(shard["image"]), shard)
        self.log(losses)
        total = self.model.combine(losses)
        total.backward()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    Trainer(model, rank).backward(shard)
