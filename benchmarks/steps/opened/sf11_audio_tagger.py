"""Audio tagging with FullyShardedDataParallel, flat parameters, and clipping by the norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from ddp_equivalence import Case

CLIPS, FRAMES, BANDS, TAGS = 8, 6, 5, 7
STEPS, RATE, MAX_NORM = 3, 0.4, 0.05


class Mixer(nn.Module):
    """Mixes time, then bands."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(FRAMES, FRAMES)
        self.bands = nn.Sequential(nn.Linear(BANDS, 9), nn.GELU(), nn.Linear(9, BANDS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(x.transpose(1, 2)).transpose(1, 2)
        return x + self.bands(x)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.Sequential(Mixer(), Mixer())
        self.tags = nn.Linear(BANDS, TAGS)

    def forward(self, spectrogram: Tensor) -> Tensor:
        return self.tags(self.mixers(spectrogram).mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["spectrogram"]), batch["tags"])


def clips(generator: torch.Generator) -> dict[str, Tensor]:
    count = CLIPS * STEPS
    return {
        "spectrogram": torch.randn(count, FRAMES, BANDS, generator=generator),
        "tags": (torch.rand(count, TAGS, generator=generator) < 0.3).double(),
    }


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


class ShardedTraining:
    def __init__(self, model: nn.Module) -> None:
        self.fsdp = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({Mixer}),
            use_orig_params=False,
            device_id=torch.device("cpu"),
        )
        self.optimizer = make_optimizer(self.fsdp.parameters())

    def update(self, batch: dict[str, Tensor]) -> None:
        # Two halves, of which only the second one communicates.
        halves = [dict(zip(batch, pair)) for pair in zip(*(v.chunk(2) for v in batch.values()))]
        with self.fsdp.no_sync():
            (loss(self.fsdp, halves[0]) / 2).backward()
        (loss(self.fsdp, halves[1]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(self.fsdp.parameters(), max_norm=MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.fsdp, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                for name, parameter in self.fsdp.named_parameters()
            }


def step(model, shard, rank):
    training = ShardedTraining(model)
    size = len(shard["tags"]) // STEPS
    for number in range(STEPS):
        here = slice(number * size, (number + 1) * size)
        training.update({name: value[here] for name, value in shard.items()})
    return training.weights()


case = Case(model=Tagger, batch=clips, loss=loss, layout="1x2", dtype=torch.float32)
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS}
