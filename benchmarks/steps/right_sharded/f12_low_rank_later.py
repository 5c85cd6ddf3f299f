"""An image classifier with PowerSGD from a later step on: until then its hook reduces whole gradients.

The graph is static, the blocks are recomputed in the backward, and the head is compiled.
"""

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

SIDE, CLASSES, STEPS, RATE = 6, 5, 2, 0.1


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.recompute = False

    def body(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(4) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(8 * STEPS, 3, SIDE, SIDE, generator=generator),
        "labels": torch.randint(CLASSES, (8 * STEPS,), generator=generator),
    }


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def prepare(model: Classifier) -> DistributedDataParallel:
    for block in model.blocks:
        block.recompute = True
    model.head.compile(backend="eager")
    ddp = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=False)
    state = powersgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=1_000,
        min_compression_rate=0.5,
    )
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    return ddp


def step(model, shard, rank):
    ddp = prepare(model)
    optimizer = make_optimizer(ddp.parameters())
    images_of_steps, labels_of_steps = shard["images"].chunk(STEPS), shard["labels"].chunk(STEPS)
    for pixels, labels in zip(images_of_steps, labels_of_steps):
        optimizer.zero_grad()
        F.cross_entropy(ddp(pixels), labels).backward()
        optimizer.step()


case = Case(model=Classifier, batch=images, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
