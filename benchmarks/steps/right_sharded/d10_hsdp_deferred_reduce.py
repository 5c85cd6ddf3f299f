"""HSDP with deferred all-reduce: every micro-batch is reduce-scattered, only the last crosses nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case


@dataclass(frozen=True)
class HSDPConfig:
    micro_batches: int = 3
    reshard_after_forward: bool = False


class GatedUnit(nn.Module):
    # widths that no number of ranks divides
    def __init__(self, width, inner):
        super().__init__()
        self.value = nn.Linear(width, inner)
        self.gate = nn.Linear(width, inner)
        self.back = nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.ones(()).expand(1).clone())

    def forward(self, x):
        return x + self.scale * self.back(self.value(x) * torch.sigmoid(self.gate(x)))


class WeightedRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList([GatedUnit(5, 7), GatedUnit(5, 3)])
        self.readout = nn.Linear(5, 1)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return self.readout(x).squeeze(-1)


def weighted_error(model, batch):
    return (batch["weight"] * (model(batch["x"]) - batch["y"]).square()).sum()


class HSDPStrategy:
    def __init__(self, config: HSDPConfig, rank):
        self.config = config
        self.mesh = init_device_mesh(
            "cpu",
            (rank.nodes, rank.local_world_size),
            mesh_dim_names=("replicate", "shard"),
        )

    def setup_module(self, model):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        arguments = dict(
            mesh=self.mesh,
            mp_policy=policy,
            reshard_after_forward=self.config.reshard_after_forward,
        )
        for module in (*model.units, model):
            fully_shard(module, **arguments)
            # the loss is divided by the weight on all ranks, so gradients are summed
            module.set_gradient_divide_factor(1.0)
        return model

    def before_backward(self, model, is_last):
        model.set_is_last_backward(is_last)
        model.set_requires_all_reduce(is_last)


class StepRunner:
    def __init__(self, model, strategy):
        self.strategy = strategy
        self.model = strategy.setup_module(model)

    def __call__(self, batch):
        total = batch["weight"].sum()
        dist.all_reduce(total)
        pieces = [value.tensor_split(self.strategy.config.micro_batches) for value in batch.values()]
        micro_batches = [dict(zip(batch, piece)) for piece in zip(*pieces)]
        for number, micro_batch in enumerate(micro_batches, start=1):
            self.strategy.before_backward(self.model, is_last=number == len(micro_batches))
            (weighted_error(self.model, micro_batch) / total).backward()


def make_batch(generator):
    return {
        "x": torch.randn(20, 5, generator=generator),
        "y": torch.randn(20, generator=generator),
        "weight": torch.rand(20, generator=generator) * torch.linspace(0.2, 3.0, 20),
    }


def loss(model, batch):
    return weighted_error(model, batch) / batch["weight"].sum()


def step(model, shard, rank):
    StepRunner(model, HSDPStrategy(HSDPConfig(), rank))(shard)


case = Case(model=WeightedRegressor, batch=make_batch, loss=loss, layout="2x2")
