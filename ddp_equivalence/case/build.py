"""Rebuild model and batch from a case: the same, to the last bit, in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import seeded
from ddp_equivalence.case.shards import split
from ddp_equivalence.case.steps import Steps

LARGEST_INTEGER = 3

"""Weights and inputs of the exact lane are integers from -3 to 3: sums stay far below 2^24."""

_BUILT = "_ddp_equivalence_built"

"""Marks a model that was handed out once."""


def build_model(case: Case) -> nn.Module:
    """The model at its start, on the CPU, in the case's dtype. Raises BadCase if it has none."""
    builder = MODELS[case.model].build if isinstance(case.model, str) else case.model
    try:
        with seeded(case.seed):
            model: object = builder()
    except Exception as error:
        raise BadCase("model", name_of(case.model), _raised(error)) from error
    if not isinstance(model, nn.Module):
        right = f"a builder that returns an nn.Module, not {type(model).__name__}"
        raise BadCase("model", name_of(case.model), right)
    if getattr(model, _BUILT, False):
        right = "a builder that makes a new model at each call; this one returned the same again"
        raise BadCase("model", name_of(case.model), right)
    object.__setattr__(model, _BUILT, True)
    _check_tensors(case, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        right = "a model with at least one parameter that requires a gradient"
        raise BadCase("model", name_of(case.model), right)
    if case.dtype is not None:
        model.to(case.dtype)
    if case.exact:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(_integers(parameter))
    return model


def _check_tensors(case: Case, model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            right = f"a model whose sizes are known; {name} is lazy: call it once in the builder"
            raise BadCase("model", name_of(case.model), right)
        if tensor.is_complex():
            right = (
                f"a real model: {name} is {tensor.dtype}, and complex gradients are not compared"
            )
            raise BadCase("model", name_of(case.model), right)


def build_batches(case: Case, steps: Steps = 1) -> list[Any]:
    """The big batches, one for every step, on the CPU, floating-point leaves in the case's dtype.

    Raises BadCase if the batch holds no tensor, its leaves disagree in length, or it cannot be
    read as that many big batches.
    """
    batch = _catalogue_batch(case, steps) if case.batch is None else _own_batch(case)
    batch = pytree.tree_map_only(Tensor, lambda leaf: _cast(leaf, case), batch)
    sizes = _sizes(count_examples(batch), steps)
    if len(sizes) == 1:
        return [batch]
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    return [
        take(batch, range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
    ]


def loss_of(case: Case) -> Any:
    """The loss as a callable (model, batch) -> scalar."""
    return LOSSES[case.loss] if isinstance(case.loss, str) else case.loss


def catalogue_loss_of(case: Case, needed_by: str) -> CatalogueLoss:
    """The catalogue's loss, which knows its own normalisers.

    Raises BadCase for a loss of the user's own, since only its value is known.
    """
    if isinstance(case.loss, str):
        return LOSSES[case.loss]
    names = ", ".join(LOSSES)
    raise BadCase("loss", name_of(case.loss), f"one of {names}: {needed_by} needs its normaliser")


def _sizes(examples: int, steps: Steps) -> tuple[int, ...]:
    right = f"steps that divide the {examples} examples of the batch, or the examples of each step"
    if isinstance(steps, tuple):
        whole = all(isinstance(size, int) and size > 0 for size in steps)
        if not steps or not whole or sum(steps) != examples:
            raise BadCase("steps", steps, right)
        return steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1 or examples % steps:
        raise BadCase("steps", steps, right)
    return (examples // steps,) * steps


def _own_batch(case: Case) -> Any:
    assert case.batch is not None
    try:
        with seeded(case.seed):
            return case.batch(torch.Generator().manual_seed(case.seed))
    except Exception as error:
        raise BadCase("batch", name_of(case.batch), _raised(error)) from error


def _catalogue_batch(case: Case, steps: Steps) -> Batch:
    assert isinstance(case.model, str)
    assert isinstance(case.loss, str)
    generator = torch.Generator().manual_seed(case.seed)
    model, loss = MODELS[case.model], LOSSES[case.loss]
    each = case.catalogue_examples
    total = sum(steps) if isinstance(steps, tuple) else steps * each
    inputs = model.inputs(generator, total)
    targets = loss.targets(generator, inputs, model)
    if case.shards == "no_valid_token":
        if loss.output != "tokens":
            raise BadCase("shards", case.shards, f"a loss over tokens; {loss.name} has none")
        last = list(split(case.shards, each, case.ranks.world_size).indices[-1])
        targets[last] = PADDING
    return {"inputs": inputs, "targets": targets}


def _cast(leaf: Tensor, case: Case) -> Tensor:
    if not leaf.is_floating_point():
        return leaf
    leaf = leaf if case.dtype is None else leaf.to(case.dtype)
    return _integers(leaf) if case.exact else leaf


def _integers(values: Tensor) -> Tensor:
    largest = values.abs().max() if values.numel() else 1
    return (values / largest * LARGEST_INTEGER).round()


def _raised(error: Exception) -> str:
    return f"a function that returns; it raised {type(error).__name__}: {error}"
