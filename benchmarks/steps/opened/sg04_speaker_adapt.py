"""Speaker-adaptive training of an acoustic encoder under FullyShardedDataParallel."""
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case


class SpeakerAdapter(nn.Module):
    """Scale and shift of the features per speaker; small, and looked up by name in the checkpoints."""

    def __init__(self, speakers, dim):
        super().__init__()
        self.scale = nn.Embedding(speakers, dim)
        self.shift = nn.Embedding(speakers, dim)
        nn.init.normal_(self.scale.weight, 1.0, 0.1)

    def forward(self, x, speaker):
        return x * self.scale(speaker).unsqueeze(1) + self.shift(speaker).unsqueeze(1)


class TDNNLayer(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=dilation, dilation=dilation)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(x + F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))


class AcousticModel(nn.Module):
    def __init__(self, mels=8, dim=12, senones=11, speakers=5):
        super().__init__()
        self.front = nn.Linear(mels, dim)
        self.adapter = SpeakerAdapter(speakers, dim)
        self.layers = nn.ModuleList(TDNNLayer(dim, d) for d in (1, 2))
        self.senone = nn.Linear(dim, senones)

    def forward(self, feats, speaker):
        x = self.adapter(self.front(feats), speaker)
        for layer in self.layers:
            x = layer(x)
        return self.senone(x)


def frames(generator):
    return {
        "feats": torch.randn(8, 9, 8, generator=generator),
        "speaker": torch.randint(0, 5, (8,), generator=generator),
        "align": torch.randint(0, 11, (8, 9), generator=generator),
    }


def frame_ce(model, batch):
    logits = model(batch["feats"], batch["speaker"])
    return F.cross_entropy(logits.flatten(0, 1), batch["align"].flatten())


@dataclass
class StrategyConfig:
    sharding: ShardingStrategy = ShardingStrategy.FULL_SHARD
    wrap: set = field(default_factory=lambda: {TDNNLayer})
    # kept whole, so that single speakers can be exported without gathering
    ignore: tuple = (SpeakerAdapter,)


class FSDPStrategy:
    def __init__(self, config):
        self.config = config

    def setup(self, model):
        ignored = [m for m in model.modules() if isinstance(m, self.config.ignore)]
        self.module = FSDP(
            model,
            sharding_strategy=self.config.sharding,
            auto_wrap_policy=ModuleWrapPolicy(self.config.wrap),
            ignored_modules=ignored,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        return self.module

    def training_step(self, batch, criterion):
        value = criterion(self.module, batch)
        value.backward()
        return value.detach()

    def gradients(self):
        with FSDP.summon_full_params(self.module, with_grads=True):
            return {name: p.grad.clone() for name, p in self.module.named_parameters()}


def step(model, shard, rank):
    strategy = FSDPStrategy(StrategyConfig())
    strategy.setup(model)
    strategy.training_step(shard, frame_ce)
    return strategy.gradients()


case = Case(model=AcousticModel, batch=frames, loss=frame_ce, layout="1x2")
