"""An image classifier in channels-last memory format. All gradients travel as one flat vector."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class SmallConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, kernel_size=3, padding=1)
        self.body = nn.Conv2d(6, 6, kernel_size=3, stride=2)
        self.head = nn.Linear(6, 5)
        # Convolutions are faster in this format on the machines we train on.
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        images = images.contiguous(memory_format=torch.channels_last)
        hidden = torch.tanh(self.stem(images))
        hidden = torch.tanh(self.body(hidden))
        return self.head(hidden.mean(dim=(2, 3)))


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def make_batch(generator):
    return {
        "image": torch.randn(8, 3, 6, 6, generator=generator),
        "label": torch.randint(0, 5, (8,), generator=generator),
    }


case = Case(model=SmallConvNet, batch=make_batch, loss=loss, layout="1x2")


class FlatAverager:
    """One collective for the whole model: pack, reduce, unpack."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.params]

    def pack(self):
        return torch.cat([p.grad.reshape(-1) for p in self.params])

    def unpack(self, flat):
        for p, piece in zip(self.params, flat.split(self.sizes), strict=True):
            p.grad.reshape(-1).copy_(piece)

    def run(self):
        flat = self.pack()
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        self.unpack(flat)


def step(model, shard, rank):
    averager = FlatAverager(model)
    model.zero_grad()
    loss(model, shard).backward()
    averager.run()
