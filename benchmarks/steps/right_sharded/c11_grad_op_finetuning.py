"""FSDP1 fine-tuning: SHARD_GRAD_OP, a small adapter left to plain data parallelism, clipping.

The adapter is in ``ignored_states``, since FSDP cannot shard a scalar with profit. Its gradient is
averaged by hand after the last micro-batch.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case

MAX_NORM = 0.3
MICRO_BATCHES = 4


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, states):
        return self.scale * states + self.shift


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, states):
        return states + self.inner(states)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.adapter = Adapter(8)
        self.head = nn.Linear(8, 4)

    def forward(self, rows):
        return self.head(self.adapter(self.blocks(self.stem(rows))))


def rows(generator):
    return {
        "rows": 2 * torch.randn(24, 5, generator=generator),
        "classes": torch.randint(0, 4, (24,), generator=generator),
        "weights": torch.rand(24, generator=generator).pow(3),
    }


def weighted_sum(model, batch):
    losses = nn.functional.cross_entropy(model(batch["rows"]), batch["classes"], reduction="none")
    return (losses * batch["weights"]).sum()


def loss(model, batch):
    return weighted_sum(model, batch) / batch["weights"].sum()


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.05, eps=1e-3)


def split(batch, parts):
    chunks = {name: values.chunk(parts) for name, values in batch.items()}
    return [{name: pieces[i] for name, pieces in chunks.items()} for i in range(parts)]


def step(model, shard, rank):
    adapter = model.adapter
    fsdp = FSDP(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_states=list(adapter.parameters()),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = make_optimizer(fsdp.parameters())
    total = shard["weights"].sum()
    dist.all_reduce(total)

    micro_batches = split(shard, MICRO_BATCHES)
    for number, micro_batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else fsdp.no_sync():
            (weighted_sum(fsdp, micro_batch) * rank.world_size / total).backward()
    for parameter in adapter.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
    fsdp.clip_grad_norm_(MAX_NORM)
    optimizer.step()

    with FSDP.summon_full_params(fsdp):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in fsdp.named_parameters()
        }


case = Case(model=Classifier, batch=rows, loss=loss, layout="1x2", dtype=torch.float32)
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM}
