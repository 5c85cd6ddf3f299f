"""Self-distillation: a student follows a teacher whose outputs are centred over the batch."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CROP, PROTOTYPES = 14, 12
WARM, COLD = 0.5, 0.2


def network():
    return nn.Sequential(
        nn.Linear(CROP, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8), nn.Linear(8, PROTOTYPES)
    )


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = network()
        self.teacher = copy.deepcopy(self.student)
        self.drift()
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def drift(self):
        """The moving average has not yet caught up with the student."""
        for weight in self.teacher.parameters():
            weight.add_(0.3 * torch.randn_like(weight))

    def forward(self, local_view, global_view):
        with torch.no_grad():
            targets = self.teacher(global_view)
        return self.student(local_view), targets


class Centre:
    """The mean of the teacher's outputs, over all that were seen in this step."""

    def __init__(self, world_size=1):
        self.world_size = world_size

    @torch.no_grad()
    def __call__(self, outputs):
        centre = outputs.sum(dim=0, keepdim=True)
        if self.world_size > 1:
            dist.all_reduce(centre)
        return centre / len(outputs)


def distil(student, teacher, centre):
    targets = ((teacher - centre) / COLD).softmax(-1)
    return -(targets * (student / WARM).log_softmax(-1)).sum(-1).mean()


def views(generator):
    picture = torch.randn(20, CROP, generator=generator)
    noise = torch.randn(2, 20, CROP, generator=generator)
    return {"local": picture + 0.5 * noise[0], "global": picture + 0.1 * noise[1]}


def loss(model, batch):
    student, teacher = model(batch["local"], batch["global"])
    return distil(student, teacher, Centre()(teacher))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    student, teacher = ddp(shard["local"], shard["global"])
    distil(student, teacher, Centre(rank.world_size)(teacher)).backward()


case = Case(model=Pair, batch=views, loss=loss, layout="1x2")
