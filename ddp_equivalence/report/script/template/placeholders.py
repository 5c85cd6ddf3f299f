"""The names that depend on the case. ``template_filler.py`` puts something else in their place.

The values and functions here only give the types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import BatchDims
from ddp_equivalence.ranks.rank import Rank

NODE_OF_RANK: tuple[int, ...] = (0,)
BACKEND: str | None = None
SEED = 0
SEED_DISTANCE = 0
BATCH_SEED = 0
GENERATOR_SEED = 0
DTYPE: torch.dtype | None = None
TOLERANCE = 1.0
LEARNING_RATE = 0.1
BIG_BATCHES: list[Sequence[int]] = []
SHARDS: list[list[Sequence[int]]] = []
CASE_SHARDS: list[list[Sequence[int]]] = []  # differs from SHARDS if one process runs all replicas
EXAMPLES = 0
OUTPUT_SIZE = 0
PADDED: list[int] = []
UNUSED_PARAMETERS = False
RANKS_OF_NODE: list[tuple[int, ...]] = []
LOSS_NAME: str | None = None
LOSS: Any = None
BATCH_DIMS: BatchDims = None

Gradients = Mapping[str, Tensor | None]


def build_model() -> nn.Module:
    raise NotImplementedError


def make_batch(generator: torch.Generator) -> Any:
    raise NotImplementedError


def loss(model: nn.Module, batch: Any) -> Tensor:
    raise NotImplementedError


def step(model: nn.Module, shard: Any, rank: Rank) -> Gradients | None:
    raise NotImplementedError


def users_step(model: nn.Module, shard: Any, rank: Rank) -> Gradients | None:
    raise NotImplementedError


def prepare(task: Any) -> Any:
    raise NotImplementedError


def model_inputs(generator: torch.Generator, examples: int) -> Tensor:
    raise NotImplementedError


def loss_targets(generator: torch.Generator, inputs: Tensor, model: Any) -> Any:
    raise NotImplementedError


def take_examples(batch: Any, indices: Sequence[int]) -> Any:
    raise NotImplementedError


def model_at_start() -> nn.Module:
    raise NotImplementedError


def big_batches() -> list[Any]:
    raise NotImplementedError


def on_one_device(dtype: torch.dtype | None, scale: float = 1.0) -> Gradients:
    raise NotImplementedError


def on_this_rank(rank: Rank) -> Gradients:
    raise NotImplementedError
