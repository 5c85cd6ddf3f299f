"""Precision plugin for fully_shard: dtypes are given as strings in the recipe."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class PrecisionConfig:
    param_dtype: str = "fp32"
    reduce_dtype: str = "bf16"
    output_dtype: str | None = "fp32"


@dataclass
class Recipe:
    reshard_after_forward: bool = True
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


class PrecisionPlugin:
    def __init__(self, config):
        self.config = config

    def policy(self) -> MixedPrecisionPolicy:
        output = self.config.output_dtype
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[self.config.param_dtype],
            reduce_dtype=DTYPES[self.config.reduce_dtype],
            output_dtype=None if output is None else DTYPES[output],
        )


class Preference(nn.Module):
    """Scores a chosen and a rejected answer."""

    def __init__(self, width=15):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(10, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.value = nn.Linear(width, 1, bias=False)

    def forward(self, chosen, rejected):
        both = self.value(self.encoder(torch.stack([chosen, rejected])))
        return both[0].squeeze(-1), both[1].squeeze(-1)


class RewardTrainer:
    def __init__(self, model, recipe):
        policy = PrecisionPlugin(recipe.precision).policy()
        for module in (model.encoder, model):
            fully_shard(
                module,
                mp_policy=policy,
                reshard_after_forward=recipe.reshard_after_forward,
            )
        self.model = model
        self.metrics = {}

    def compute_loss(self, inputs):
        chosen, rejected = self.model(inputs["chosen"], inputs["rejected"])
        self.metrics["accuracy"] = (chosen > rejected).float().mean().item()
        return preference_loss(chosen, rejected, inputs["margin"])

    def training_step(self, inputs):
        self.compute_loss(inputs).backward()


def preference_loss(chosen, rejected, margin):
    return -nn.functional.logsigmoid(chosen - rejected - margin).mean()


def make_batch(generator):
    return {
        "chosen": torch.randn(12, 10, generator=generator) + 0.5,
        "rejected": torch.randn(12, 10, generator=generator),
        "margin": torch.rand(12, generator=generator),
    }


def loss(model, batch):
    return preference_loss(*model(batch["chosen"], batch["rejected"]), batch["margin"])


def step(model, shard, rank):
    RewardTrainer(model, Recipe()).training_step(shard)


case = Case(
    model=Preference, batch=make_batch, loss=loss, layout="1x2", dtype=torch.float32
)
