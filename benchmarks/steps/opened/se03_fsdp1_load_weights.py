"""FSDP1: wrap a freshly built tower, then write the pre-trained weights into the wrapped model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case


class MLPBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    def __init__(self, width=10, depth=3, classes=5):
        super().__init__()
        self.blocks = nn.Sequential(*(MLPBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x))


def batch(generator):
    return {
        "x": torch.randn(12, 10, generator=generator),
        "label": torch.randint(0, 5, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def build_wrapped(dtype):
    return FSDP(
        Tower().to(dtype),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({MLPBlock}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


@torch.no_grad()
def load_weights(fsdp, weights, rank):
    """Writes the full weights of a checkpoint into the model; leaving the context shards them."""
    with FSDP.summon_full_params(fsdp, writeback=True):
        if rank.rank == 0:
            for name, p in fsdp.named_parameters():
                p.copy_(weights[clean(name)])


def full_gradients(fsdp):
    with FSDP.summon_full_params(fsdp, with_grads=True):
        return {clean(name): p.grad.clone() for name, p in fsdp.named_parameters()}


def step(model, shard, rank):
    weights = model.state_dict()
    fsdp = build_wrapped(weights["head.weight"].dtype)
    load_weights(fsdp, weights, rank)
    loss(fsdp, shard).backward()
    return full_gradients(fsdp)


case = Case(model=Tower, batch=batch, loss=loss, layout="1x2")
