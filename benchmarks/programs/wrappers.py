"""The ways in which a training loop makes its gradients those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from benchmarks.programs.common import average
from ddp_equivalence import Rank

Make = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the optimizer of a list of parameters."""


@dataclass(frozen=True)
class Clip:
    """Clips gradients to a norm, or each of their elements to a value."""

    norm: float | None = None
    value: float | None = None

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self.norm is not None:
            clip_grad_norm_(parameters, self.norm)
        if self.value is not None:
            clip_grad_value_(parameters, self.value)


class Wrapper:
    """``module`` is what is called, and whose parameters are trained."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.module, self.rank = self.wrap(model), rank

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self) -> AbstractContextManager[Any]:
        """Where gradients are only added up on the rank."""
        return nullcontext()

    def reduce(self) -> None:
        """What is left to do after the last backward."""

    def optimizer(self, make: Make) -> Optimizer:
        return make(list(self.module.parameters()))

    def clip(self, how: Clip) -> None:
        """Clip the gradients that the optimizer will step with."""
        how(list(self.module.parameters()))


class Ddp(Wrapper):
    """DistributedDataParallel."""

    options: ClassVar[dict[str, Any]] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, **self.options)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()


class StaticGraph(Ddp):
    """DDP with static_graph=True."""

    options: ClassVar[dict[str, Any]] = {"static_graph": True}

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()  # averages of every micro-batch are added up


class FindUnused(Ddp):
    """DDP that looks for unused parameters."""

    options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


class BucketViews(Ddp):
    """DDP whose gradients are views of small buckets."""

    options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}


class CompiledDdp(Ddp):
    """DDP that is compiled as a whole."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.ddp = DistributedDataParallel(model)
        return torch.compile(self.ddp, backend="aot_eager")  # type: ignore[return-value]

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()


class DdpOfCompiled(Ddp):
    """DDP of a compiled model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(torch.compile(model, backend="aot_eager"))


class Autocast(Ddp):
    """DDP that computes in bfloat16 under autocast."""

    def wrap(self, model: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(model)
        ddp.register_forward_pre_hook(self._enter)
        ddp.register_forward_hook(self._leave)
        return ddp

    def _enter(self, module: nn.Module, arguments: object) -> None:
        self._region = torch.autocast("cpu", dtype=torch.bfloat16)
        self._region.__enter__()

    def _leave(self, module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        self._region.__exit__(None, None, None)
        return output.float()


class Zero(Ddp):
    """DDP whose optimizer is divided among the ranks (ZeRO, stage 1)."""

    def optimizer(self, make: Make) -> Optimizer:
        return ZeroRedundancyOptimizer(self.module.parameters(), optimizer_class=make)


class ByHand(Wrapper):
    """Every gradient is all-reduced and divided by the number of ranks."""

    def reduce(self) -> None:
        average(self.module, self.rank)


class ByFlatBuffer(Wrapper):
    """All gradients are all-reduced in one flat buffer."""

    def reduce(self) -> None:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.rank.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class FullyShard(Wrapper):
    """FSDP2: fully_shard of every layer, and of the model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)


class FlatParameters(Wrapper):
    """FSDP1: FullyShardedDataParallel, which trains flat parameters."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    def clip(self, how: Clip) -> None:
        if how.norm is None:
            super().clip(how)
        else:
            self.module.clip_grad_norm_(how.norm)


WRAPPERS: dict[str, type[Wrapper]] = {
    "ddp": Ddp,
    "static_graph": StaticGraph,
    "find_unused": FindUnused,
    "bucket_views": BucketViews,
    "compiled_ddp": CompiledDdp,
    "ddp_of_compiled": DdpOfCompiled,
    "autocast": Autocast,
    "zero": Zero,
    "by_hand": ByHand,
    "by_flat_buffer": ByFlatBuffer,
    "fully_shard": FullyShard,
    "flat_parameters": FlatParameters,
}
