"""Video prediction with a gradient scaler; rank 0 logs the norm of the gradients."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

CLIPS, FRAMES, SIZE = 9, 4, 6


class NextFrame(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 4, kernel_size=(FRAMES, 3, 3), padding=(0, 1, 1))
        self.skip = nn.Conv2d(1, 4, kernel_size=1)
        self.out = nn.Conv2d(4, 1, kernel_size=3, padding=1)

    def forward(self, clip):
        motion = self.conv(clip[:, None]).squeeze(2)
        return self.out(torch.relu(motion + self.skip(clip[:, -1:])))


def loss(model, batch):
    prediction = model(batch["clip"])
    error = (prediction - batch["next"][:, None]).abs()
    sharp = prediction.diff(dim=-1).square().mean()
    return error.mean() + 0.01 * sharp


def clips(generator):
    return {
        "clip": torch.rand(CLIPS, FRAMES, SIZE, SIZE, generator=generator),
        "next": torch.rand(CLIPS, SIZE, SIZE, generator=generator),
    }


case = Case(model=NextFrame, batch=clips, loss=loss, layout="1x3")


class Engine:
    def __init__(self, model, lr=1e-3):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.log = []

    def reduce(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def gradient_norm(self):
        self.scaler.unscale_(self.optimizer)
        return torch.stack([p.grad.norm() for p in self.model.parameters()]).norm()

    def backward(self, batch):
        self.optimizer.zero_grad()
        self.scaler.scale(loss(self.model, batch)).backward()
        self.reduce()
        if dist.get_rank() == 0:
            self.log.append(float(self.gradient_norm()))


def step(model, shard, rank):
    Engine(model).backward(shard)
