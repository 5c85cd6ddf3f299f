"""Audio tagging with a gradient scaler and clipping, as in a mixed-precision loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

TAGS = 6
SETTINGS = {"lr": 0.1, "clip": 0.3, "scale": 2.0**8, "steps": 2}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral = nn.Conv2d(1, 4, (5, 3), padding=(2, 1))
        self.temporal = nn.Conv2d(4, 8, (1, 3), padding=(0, 1))
        self.tags = nn.Linear(8, TAGS)

    def forward(self, spectrogram):
        x = F.elu(self.spectral(spectrogram.unsqueeze(1)))
        x = F.elu(self.temporal(F.avg_pool2d(x, 2)))
        return self.tags(x.amax(dim=(2, 3)))


def clips(generator):
    n = 8 * SETTINGS["steps"]
    return {
        "spectrogram": torch.randn(n, 8, 10, generator=generator),
        "tags": (torch.rand(n, TAGS, generator=generator) < 0.3).float(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(
        model(batch["spectrogram"]), batch["tags"], pos_weight=torch.tensor(2.0).to(batch["tags"])
    )


class Precision:
    """Scales the loss, and steps with gradients of the right size."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SETTINGS["scale"], growth_interval=1000)

    def backward(self, value):
        self.scaler.scale(value).backward()

    def clip(self, parameters, largest):
        return nn.utils.clip_grad_norm_(parameters, largest)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def batches(shard):
    parts = {key: value.chunk(SETTINGS["steps"]) for key, value in shard.items()}
    for k in range(SETTINGS["steps"]):
        yield {key: parts[key][k] for key in parts}


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=SETTINGS["lr"], nesterov=True, momentum=0.8)


def step(model, shard, rank):
    ddp = DDP(model)
    precision = Precision(make_optimizer(ddp.parameters()))
    for batch in batches(shard):
        precision.backward(loss(ddp, batch))
        precision.clip(ddp.parameters(), SETTINGS["clip"])
        precision.step()


case = Case(model=Tagger, batch=clips, loss=loss)
options = {
    "compare": "update",
    "steps": SETTINGS["steps"],
    "optimizer": make_optimizer,
    "clip": SETTINGS["clip"],
}
