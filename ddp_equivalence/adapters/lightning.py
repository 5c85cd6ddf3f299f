"""Lightning's Trainer, and a loop with Fabric, as a step for ``check(..., compare="update")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_equivalence.adapters import MakeOptimizer, Rows, micro_batch_size, plain_sgd, trainers_room
from ddp_equivalence.ranks.rank import Rank

try:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer
except ImportError:  # the same libraries are released under two names
    from lightning_fabric import Fabric
    from pytorch_lightning import LightningModule, Trainer

Loop = Callable[[Fabric, nn.Module, Any, Any], object]
"""Trains on everything that the loader yields: (fabric, model, optimizer, loader)."""

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments that differ from the defaults of Lightning's Trainer, and can be overridden."""


class OneLoss(LightningModule):
    """A LightningModule that trains a plain model with a loss ``(model, batch) -> scalar``."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], optimizer: MakeOptimizer
    ) -> None:
        super().__init__()
        self.model, self.loss, self.make_optimizer = model, loss, optimizer

    def training_step(self, batch: Any, number: int) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(list(self.model.parameters()))


def lightning_step(
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    steps: int = 1,
    optimizer: MakeOptimizer = plain_sgd,
    batch_size: int | None = None,
    shuffle: bool = False,
    **settings: Any,
) -> Callable[[nn.Module, Any, Rank], None]:
    """A step that trains with Lightning's Trainer for ``steps`` optimizer steps.

    ``loss``: None if the case's model is a LightningModule itself, with its own training step and
    optimizers. ``settings``: arguments of the Trainer, such as ``accumulate_grad_batches``.
    ``batch_size``: of one rank's loader; the default divides the examples into ``steps`` steps.
    """

    def step(model: nn.Module, whole: Any, rank: Rank) -> None:
        rows, module = Rows(whole), model if loss is None else OneLoss(model, loss, optimizer)
        accumulation = settings.get("accumulate_grad_batches", 1)
        size = batch_size or micro_batch_size(len(rows), rank, steps, accumulation)
        chosen = _processes(rank) | {"max_steps": steps, "use_distributed_sampler": True}
        with trainers_room(rank) as folder:
            trainer = Trainer(default_root_dir=folder, **(QUIET | chosen | settings))
            trainer.fit(module, DataLoader(rows, batch_size=size, shuffle=shuffle))

    return step


def fabric_step(
    loop: Loop,
    *,
    steps: int = 1,
    optimizer: MakeOptimizer = plain_sgd,
    batch_size: int | None = None,
    shuffle: bool = False,
    **settings: Any,
) -> Callable[[nn.Module, Any, Rank], None]:
    """A step that gives ``loop`` a launched Fabric, and what it has set up.

    ``settings``: arguments of ``Fabric``, such as ``precision``. ``batch_size``: of one rank's
    loader; the default divides the examples into ``steps`` steps. Give it if the loop accumulates.
    """

    def step(model: nn.Module, whole: Any, rank: Rank) -> None:
        rows = Rows(whole)
        size = batch_size or micro_batch_size(len(rows), rank, steps, accumulation=1)
        loader = DataLoader(rows, batch_size=size, shuffle=shuffle)
        with trainers_room(rank):
            fabric = Fabric(**(_processes(rank) | settings))
            fabric.launch()
            wrapped, its_optimizer = fabric.setup(model, optimizer(list(model.parameters())))
            loop(fabric, wrapped, its_optimizer, fabric.setup_dataloaders(loader))

    return step


def _processes(rank: Rank) -> dict[str, Any]:
    """The arguments of a Trainer or a Fabric that say which processes there are."""
    arguments: dict[str, Any] = {"devices": rank.local_world_size, "num_nodes": rank.nodes}
    arguments["accelerator"] = "cpu" if rank.device.type == "cpu" else "gpu"
    return arguments | ({"strategy": "ddp"} if rank.world_size > 1 else {})
