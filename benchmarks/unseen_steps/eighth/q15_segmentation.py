"""Segmentation with a pretrained encoder: the decoder learns faster than the encoder."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F

from ddp_equivalence import Case

CLASSES, SIDE = 3, 6
STEPS = 2


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.GELU())
        self.decoder = nn.Conv2d(5, CLASSES, 1)

    def forward(self, images):
        return self.decoder(self.encoder(images))


def slices(generator):
    n = 8 * STEPS
    return {
        "images": torch.randn(n, 1, SIDE, SIDE, generator=generator),
        "masks": torch.randint(0, CLASSES, (n, SIDE, SIDE), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["masks"])


def groups_of(model):
    return [
        {"params": list(model.decoder.parameters()), "lr": 0.05},
        {"params": list(model.encoder.parameters()), "lr": 0.01, "weight_decay": 0.2},
    ]


def make_optimizer(model):
    return torch.optim.AdamW(groups_of(model), eps=1e-3)


class Mean:
    """Replaces gradients by their mean over the ranks."""

    def __init__(self, optimizer, world_size):
        self.optimizer, self.world_size = optimizer, world_size

    @property
    def gradients(self):
        return [p.grad for p in self.optimizer.param_groups[0]["params"] if p.grad is not None]

    def __call__(self, *_):
        gradients = self.gradients
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(self.world_size)
        for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
            gradient.copy_(mean)


class Run:
    def __init__(self, model, rank):
        self.model = model
        self.optimizer = make_optimizer(model)
        self.optimizer.register_step_pre_hook(Mean(self.optimizer, rank.world_size))

    def __call__(self, shard):
        self.optimizer.zero_grad()
        loss(self.model, shard).backward()
        self.optimizer.step()


case = Case(model=Segmenter, batch=slices, loss=loss, layout="1x2")
step = Run
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
