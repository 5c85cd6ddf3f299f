"""Trainers of Hugging Face transformers and TRL as a step for ``check(..., compare="update")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments

from ddp_equivalence.adapters import MakeOptimizer, Rows, micro_batch_size, plain_sgd, trainers_room
from ddp_equivalence.adapters.accelerate import forget_earlier_accelerators
from ddp_equivalence.ranks.rank import Rank

QUIET = {
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "max_grad_norm": 0.0,  # no clipping, as in a check without clip=
}
"""Arguments that differ from the defaults of TrainingArguments, and can be overridden."""


def trainer_step(
    trainer: Callable[..., Any] = Trainer,
    arguments: Callable[..., Any] = TrainingArguments,
    *,
    steps: int = 1,
    optimizer: MakeOptimizer | None = plain_sgd,
    dataset: Callable[[Any], Any] = Rows,
    **settings: Any,
) -> Callable[[nn.Module, Any, Rank], None]:
    """A step that trains with ``trainer`` for ``steps`` optimizer steps.

    ``trainer``: a subclass of Trainer, such as TRL's, or ``partial(Subclass, ...)`` with its other
    arguments. ``arguments``: its class of arguments, and ``settings``: values of them.
    ``optimizer``: None lets the trainer make its own. ``dataset``: makes what the trainer takes as
    ``train_dataset`` of the batch.
    """

    def step(model: nn.Module, whole: Any, rank: Rank) -> None:
        rows = dataset(whole)
        chosen: dict[str, Any] = QUIET | {"max_steps": steps} | settings
        if "per_device_train_batch_size" not in chosen:
            accumulation = chosen.get("gradient_accumulation_steps", 1)
            size = micro_batch_size(len(rows), rank, steps, accumulation)
            chosen["per_device_train_batch_size"] = size
        if rank.device.type == "cpu":
            chosen |= {"use_cpu": True, "ddp_backend": rank.backend}
        with trainers_room(rank) as folder:
            forget_earlier_accelerators()
            try:
                given = {"model": model, "train_dataset": rows}
                if optimizer is not None:
                    made = optimizer(list(model.parameters()))
                    given["optimizers"] = (made, LambdaLR(made, lambda _: 1.0))
                training = trainer(args=arguments(output_dir=folder, **chosen), **given)
                training.remove_callback(PrinterCallback)  # prints how long training took
                training.train()
            finally:
                forget_earlier_accelerators()

    return step
