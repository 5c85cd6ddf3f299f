"""nn.DataParallel emulated in one process, as a module that DistributedDataParallel can wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.strategies.emulated_data_parallel import Replicas

LossOf = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar."""


class EmulatedDataParallel(nn.Module):
    """Takes the place of ``nn.DataParallel(module)`` on ``gpus`` GPUs.

    ``Replicas`` runs a replica of the module on each part of the batch and gathers the outputs,
    which must be one tensor. The batch is cut by ``Tensor.chunk``, as nn.DataParallel cuts it.
    Backward leaves the sum of the replicas' gradients on the module's own parameters.
    """

    def __init__(self, module: nn.Module, gpus: int) -> None:
        super().__init__()
        self.replicas, self.gpus = Replicas(module), gpus

    def forward(self, *inputs: Tensor) -> Tensor:
        """The gathered outputs for inputs of shape (examples, ...)."""
        self.replicas.sizes = [len(part) for part in inputs[0].chunk(self.gpus)]
        trained = {
            name: parameter
            for name, parameter in self.replicas.model.named_parameters()
            if parameter.requires_grad
        }
        names, parameters = tuple(trained), tuple(trained.values())
        gathered: Tensor = _SumOverReplicas.apply(  # type: ignore[no-untyped-call]  # torch's own
            self.replicas, inputs, names, *parameters
        )
        return gathered


class LossInside(nn.Module):
    """A module that returns its own loss, shape (1,), so that the losses can be gathered."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(inputs), targets).reshape(1)


class _SumOverReplicas(torch.autograd.Function):
    """Connects the gathered outputs with the module's own parameters.

    ``Replicas`` gives every replica weights that are leaves of the autograd graph. The hooks of
    DistributedDataParallel fire only if autograd brings a gradient to the module's parameters.
    Backward therefore runs through the replicas and hands the sum of their gradients on, as the
    backward of nn.DataParallel's broadcast does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replicas: Replicas,
        inputs: tuple[Tensor, ...],
        names: tuple[str, ...],
        *parameters: nn.Parameter,
    ) -> Tensor:
        with torch.enable_grad():
            outputs: Tensor = replicas(*inputs)
        ctx.outputs, ctx.names, ctx.weights = outputs, names, replicas.weights_by_replica
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        torch.autograd.backward(ctx.outputs, gradients)
        return (None, None, None, *(_sum_of_gradients(ctx.weights, name) for name in ctx.names))


def _sum_of_gradients(replicas: list[dict[str, Tensor]], name: str) -> Tensor | None:
    """The sum over the replicas; None if no replica has a gradient for this parameter."""
    gradients = [weights[name].grad for weights in replicas]
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) if present else None
