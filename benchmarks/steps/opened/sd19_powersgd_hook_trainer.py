"""DDP trainer whose communication hook is chosen by name in the configuration."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class CommHookConfig:
    name: str = "power_sgd"
    matrix_approximation_rank: int = 1
    start_iter: int = 2
    min_compression_rate: float = 1.5


@dataclass
class TrainConfig:
    lr: float = 0.1
    steps: int = 4
    comm_hook: CommHookConfig = field(default_factory=CommHookConfig)


TRAIN = TrainConfig()


class TwoStreamNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(12, 16, bias=False)
        self.right = nn.Linear(9, 16, bias=False)
        self.join = nn.Linear(16, 8)

    def forward(self, left, right):
        return self.join(torch.tanh(self.left(left)) * torch.sigmoid(self.right(right)))


def register_comm_hook(ddp: DistributedDataParallel, config: CommHookConfig) -> None:
    if config.name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.matrix_approximation_rank,
            start_powerSGD_iter=config.start_iter,
            min_compression_rate=config.min_compression_rate,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif config.name == "allreduce":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        raise ValueError(config.name)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=TRAIN.lr)


class Trainer:
    def __init__(self, model, config):
        self.config = config
        self.ddp = DistributedDataParallel(model)
        register_comm_hook(self.ddp, config.comm_hook)
        self.optimizer = sgd(self.ddp.parameters())

    def batches(self, data):
        size = len(data["target"]) // self.config.steps
        for first in range(0, len(data["target"]), size):
            yield {key: value[first : first + size] for key, value in data.items()}

    def fit(self, data):
        for batch in self.batches(data):
            self.optimizer.zero_grad(set_to_none=True)
            loss(self.ddp, batch).backward()
            self.optimizer.step()


def make_batch(generator):
    rows = 16 * TRAIN.steps
    return {
        "left": torch.randn(rows, 12, generator=generator),
        "right": torch.randn(rows, 9, generator=generator),
        "target": 3 * torch.randn(rows, 8, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["left"], batch["right"]), batch["target"])


def step(model, shard, rank):
    Trainer(model, TRAIN).fit(shard)


case = Case(
    model=TwoStreamNet, batch=make_batch, loss=loss, layout="1x2", dtype=torch.float32
)
options = {"compare": "update", "optimizer": sgd, "steps": TRAIN.steps}
