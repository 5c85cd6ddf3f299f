"""Image-text contrastive training; every rank scores its rows against the columns of all."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image, text):
        return (
            F.normalize(self.image(image), dim=-1),
            F.normalize(self.text(text), dim=-1),
            self.log_scale.exp(),
        )


def make_batch(generator):
    return {
        "image": torch.randn(12, 12, generator=generator),
        "text": torch.randn(12, 7, generator=generator),
    }


def loss(model, batch):
    image, text, scale = model(batch["image"], batch["text"])
    logits = scale * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class ClipLoss(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.cached = {}

    def labels(self, size):
        if size not in self.cached:
            self.cached[size] = torch.arange(size)
        return self.cached[size]

    def forward(self, image, text, scale):
        images = torch.cat(distnn.all_gather(image))
        texts = torch.cat(distnn.all_gather(text))
        per_image = scale * image @ texts.T
        per_text = scale * text @ images.T
        labels = self.labels(len(image))
        return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def step(model, shard, rank):
    ddp = DDP(model)
    criterion = ClipLoss(int(rank), dist.get_world_size())
    criterion(*ddp(shard["image"], shard["text"])).backward()


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="1x2")
