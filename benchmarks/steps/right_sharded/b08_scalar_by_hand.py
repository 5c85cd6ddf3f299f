"""A cosine classifier whose temperature is a scalar, which FSDP cannot shard and must ignore.

Its gradient is averaged by a hook on the scalar itself, once autograd has accumulated it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.nn import functional as F

from ddp_equivalence import Case


class CosineClassifier(nn.Module):
    def __init__(self, features=10, embedding=8, classes=6):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(features, 15), nn.ELU(), nn.Linear(15, embedding, bias=False)
        )
        self.centers = nn.Parameter(torch.randn(classes, embedding))
        self.log_temperature = nn.Parameter(torch.tensor(1.2))
        self.register_buffer("offsets", torch.linspace(-0.3, 0.3, classes))

    def forward(self, x):
        similarity = F.normalize(self.trunk(x), dim=-1) @ F.normalize(self.centers, dim=-1).T
        return self.log_temperature.exp() * similarity + self.offsets


def make_batch(generator):
    return {
        "x": torch.randn(20, 10, generator=generator),
        "label": torch.randint(6, (20,), generator=generator),
        "weight": 0.2 + torch.rand(20, generator=generator),
    }


def loss(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
    return (batch["weight"] * losses).mean()


def scalars_of(model):
    return [parameter for parameter in model.parameters() if parameter.ndim == 0]


def average_over_ranks(parameter):
    parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad)


def whole_gradients(fsdp):
    with FSDP.summon_full_params(fsdp, with_grads=True):
        found = {}
        for name, parameter in fsdp.named_parameters():
            found[name.removeprefix("_fsdp_wrapped_module.")] = parameter.grad.detach().clone()
        return found


def step(model, shard, rank):
    scalars = scalars_of(model)
    assert [parameter.numel() for parameter in scalars] == [1]
    for scalar in scalars:
        scalar.register_post_accumulate_grad_hook(average_over_ranks)
    fsdp = FSDP(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        ignored_states=scalars,
        use_orig_params=True,
        device_id=rank.device,
    )
    loss(fsdp, shard).backward()
    return whole_gradients(fsdp)


case = Case(model=CosineClassifier, batch=make_batch, loss=loss, layout="2x2")
