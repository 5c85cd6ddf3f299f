"""Models that are built in unusual ways: shared, frozen, generated, routed or wrapped parts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    ByHand,
    UnderDdp,
    average,
    mean_squared_error,
    mlp,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("structures", right=True)

FINDS_UNUSED = UnderDdp(mean_squared_error, {"find_unused_parameters": True})


@programs.model()
class TiedAutoencoder(nn.Module):
    """The decoder is the transposed encoder; a head reads the code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, ROW) / 3)
        self.last = nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(rows @ self.weight.T) @ self.weight)


@programs.model()
class OneModuleUnderTwoNames(nn.Module):
    """One layer is registered twice and used twice, so its parameters have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, ROW), nn.Linear(ROW, OUTPUTS)
        self.second = self.first

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(rows))))


@programs.model()
def weight_norm() -> nn.Module:
    """Length and direction of a weight are separate parameters."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(ROW, HIDDEN)), nn.Linear(HIDDEN, OUTPUTS)
    )


@programs.model()
def spectral_norm() -> nn.Module:
    """A weight is divided by its largest singular value, which every rank finds in the same way."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(ROW, HIDDEN)), nn.Linear(HIDDEN, OUTPUTS)
    )


@programs.model(step=ByHand(mean_squared_error))
def orthogonal_weight() -> nn.Module:
    """A weight is kept orthogonal by a parametrization."""
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(ROW, ROW)), nn.Linear(ROW, OUTPUTS))


@programs.model()
class ListsAndDicts(nn.Module):
    """Parameters live in nn.ParameterList and nn.ParameterDict, layers in nn.ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(ROW) for _ in range(3)])
        self.shifts = nn.ParameterDict({"in": torch.randn(ROW), "out": torch.randn(OUTPUTS)})
        self.layers = nn.ModuleDict({"linear": nn.Linear(ROW, OUTPUTS)})

    def forward(self, rows: Tensor) -> Tensor:
        for scale in self.scales:
            rows = torch.tanh(rows * scale + self.shifts["in"])
        return self.layers["linear"](rows) + self.shifts["out"]


@programs.model()
class Hypernetwork(nn.Module):
    """One network writes the weights of another, for every example anew."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = nn.Linear(ROW, ROW * OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        weights = self.writer(rows).view(-1, OUTPUTS, ROW)
        return torch.einsum("noi,ni->no", weights, rows)


@programs.model(step=FINDS_UNUSED)
class MixtureOfExperts(nn.Module):
    """Every example goes to one of six experts, so that ranks leave some experts unused."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(ROW, 6)
        self.experts = nn.ModuleList([nn.Linear(ROW, OUTPUTS) for _ in range(6)])

    def forward(self, rows: Tensor) -> Tensor:
        gates, chosen = self.router(rows).softmax(1).max(1)
        outputs = rows.new_zeros(len(rows), OUTPUTS)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            if len(mine):
                outputs = outputs.index_add(0, mine, expert(rows[mine]) * gates[mine, None])
        return outputs


@programs.model()
class SoftMixtureOfExperts(nn.Module):
    """Every example goes through all experts, weighted by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(ROW, 4), nn.Linear(ROW, 4 * OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        each = self.experts(rows).view(-1, 4, OUTPUTS)
        return (each * self.router(rows).softmax(1)[..., None]).sum(1)


@programs.model()
class LowRankAdapter(nn.Module):
    """The weight is frozen; only the two thin matrices beside it are trained (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(ROW, OUTPUTS).requires_grad_(False)
        self.down, self.up = nn.Linear(ROW, 2, bias=False), nn.Linear(2, OUTPUTS, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + 0.5 * self.up(self.down(rows))


@programs.model()
def frozen_body() -> nn.Module:
    """Only the last layer is trained."""
    model = mlp()
    model[0].requires_grad_(False)
    return model


@programs.model(step=FINDS_UNUSED)
class HeadThatNobodyUses(nn.Module):
    """A second head is never called, and has no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.used(rows)


class Checkpointed(nn.Module):
    """The activations of the first part are computed again in the backward pass."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(), nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.detach().requires_grad_()  # a reentrant checkpoint needs an input with a graph
        return self.last(checkpoint(self.first, rows, use_reentrant=self.reentrant))


@programs.model()
class CheckpointedTwice(Checkpointed):
    """The checkpoints are not reentrant, and one part is called twice."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + super().forward(2 * rows)


@programs.model()
class CheckpointedReentrantly(Checkpointed):
    """The checkpoint is reentrant, and every parameter is used once."""

    reentrant = True


@programs.model(step=ByHand(mean_squared_error))
class CheckpointedInSegments(nn.Module):
    """checkpoint_sequential divides the layers into two segments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = mlp(), nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint_sequential(self.layers, 2, rows, use_reentrant=False))


@programs.model()
class EnsembleByVmap(nn.Module):
    """Three copies of a model are one batched call of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        weights, _ = stack_module_state([nn.Linear(ROW, OUTPUTS) for _ in range(3)])
        self.weight, self.bias = (nn.Parameter(weights[name].detach()) for name in weights)

    def forward(self, rows: Tensor) -> Tensor:
        each = torch.vmap(F.linear, in_dims=(None, 0, 0))(rows, self.weight, self.bias)
        return torch.tanh(each).mean(0)


@programs.step()
def gradient_of_a_functional_call(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor]:
    """torch.func.grad differentiates a call with parameters from a dict; the step averages them."""

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, shard["rows"]), shard["targets"])

    found = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})
    for gradient in found.values():
        torch.distributed.all_reduce(gradient)
    return {name: gradient / rank.world_size for name, gradient in found.items()}


@programs.step(layout="1x2")
def compiled_with_the_eager_backend(model: nn.Module, shard: Any, rank: Rank) -> None:
    """torch.compile captures the model; DDP wraps what it returns."""
    ddp = DistributedDataParallel(
        torch.compile(model, backend="eager")
    )  # kept until after backward
    mean_squared_error(ddp, shard).backward()


@programs.step(layout="1x2")
def compiled_by_hand_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The whole loss is compiled by aot_eager, and gradients are averaged by hand."""
    torch.compile(mean_squared_error, backend="aot_eager")(model, shard).backward()
    average(model, rank)


@programs.model()
def half_of_a_weight_masked() -> nn.Module:
    """A pruned layer: a mask sets half of its weights, and their gradients, to zero."""
    model = mlp()
    prune.random_unstructured(model[0], "weight", amount=0.5)
    return model


@programs.step()
def trained_a_copy_of_the_model(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step trains a deep copy, and puts the gradients of the copy on the model."""
    mine = copy.deepcopy(model)
    ddp = DistributedDataParallel(mine)
    mean_squared_error(ddp, shard).backward()
    for parameter, trained in zip(model.parameters(), mine.parameters(), strict=True):
        parameter.grad = trained.grad
