"""Build a case's model, batches and loss. Every process gets the same ones, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import seeded
from ddp_equivalence.case.shards import split
from ddp_equivalence.case.steps import Steps

LARGEST_INTEGER = 3
"""Weights and inputs of an exact case are integers from -3 to 3, so that sums stay far below 2^24,
the largest number up to which float32 holds every integer."""

_BUILT = "_ddp_equivalence_built"
"""The attribute that marks a model as built before. A builder must return a new model each time."""


def build_model(case: Case) -> nn.Module:
    """Build the untrained model, on the CPU, in the case's dtype.

    Raises BadCase if the builder raises, if what it returns is not a new nn.Module, or if the model
    cannot be compared: it has lazy or complex tensors, or no parameter to train.
    """
    builder = MODELS[case.model].build if isinstance(case.model, str) else case.model
    try:
        with seeded(case.seed):
            model: object = builder()
    except Exception as error:
        raise BadCase("model", name_of(case.model), _must_not_raise(error)) from error
    if not isinstance(model, nn.Module):
        right = f"a builder that returns an nn.Module, not {type(model).__name__}"
        raise BadCase("model", name_of(case.model), right)
    if getattr(model, _BUILT, False):
        right = "a builder that makes a new model at each call; this one returned one model twice"
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
            right = f"a model whose sizes are known; {name} is lazy: call the model in the builder"
            raise BadCase("model", name_of(case.model), right)
        if tensor.is_complex():
            right = (
                f"a real model: {name} is {tensor.dtype}, and complex gradients are not compared"
            )
            raise BadCase("model", name_of(case.model), right)


def build_batches(case: Case, steps: Steps = 1) -> list[Any]:
    """Build the big batch of every step, on the CPU, with floats in the case's dtype.

    Raises BadCase if the batch holds no tensor, if its leaves differ in length, or if its examples
    cannot be divided as ``steps`` says.
    """
    batch = _catalogue_batch(case, steps) if case.batch is None else _batch_of_the_user(case)
    batch = pytree.tree_map_only(Tensor, lambda leaf: _cast(leaf, case), batch)
    sizes = _examples_by_step(count_examples(batch), steps)
    if len(sizes) == 1:
        return [batch]
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    return [
        take(batch, range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
    ]


def loss_of(case: Case) -> Any:
    """The case's loss: a function (model, batch) -> scalar tensor."""
    return LOSSES[case.loss] if isinstance(case.loss, str) else case.loss


def catalogue_loss_of(case: Case, needed_by: str) -> CatalogueLoss:
    """The case's loss as an entry of the catalogue, which says what each of its terms divides by.

    Raises BadCase for a loss of the user's own, which has only a value. The error says that
    ``needed_by`` needs more.
    """
    if isinstance(case.loss, str):
        return LOSSES[case.loss]
    names = ", ".join(LOSSES)
    right = f"one of {names}: {needed_by} needs to know what the loss divides by"
    raise BadCase("loss", name_of(case.loss), right)


def _examples_by_step(examples: int, steps: Steps) -> tuple[int, ...]:
    right = f"a number that divides the {examples} examples of the batch, or a tuple with the "
    right += "number of examples in each step"
    if isinstance(steps, tuple):
        whole = all(isinstance(size, int) and size > 0 for size in steps)
        if not steps or not whole or sum(steps) != examples:
            raise BadCase("steps", steps, right)
        return steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1 or examples % steps:
        raise BadCase("steps", steps, right)
    return (examples // steps,) * steps


def _batch_of_the_user(case: Case) -> Any:
    assert case.batch is not None
    try:
        with seeded(case.seed):
            return case.batch(torch.Generator().manual_seed(case.seed))
    except Exception as error:
        raise BadCase("batch", name_of(case.batch), _must_not_raise(error)) from error


def _catalogue_batch(case: Case, steps: Steps) -> Batch:
    assert isinstance(case.model, str)
    assert isinstance(case.loss, str)
    generator = torch.Generator().manual_seed(case.seed)
    model, loss = MODELS[case.model], LOSSES[case.loss]
    examples = case.catalogue_examples
    total = sum(steps) if isinstance(steps, tuple) else steps * examples
    inputs = model.inputs(generator, total)
    targets = loss.targets(generator, inputs, model)
    if case.shards == "no_valid_token":
        if loss.output != "tokens":
            right = f"other shards, or a loss over tokens instead of {loss.name}"
            raise BadCase("shards", case.shards, right)
        last_shard = list(split(case.shards, examples, case.ranks.world_size).indices[-1])
        targets[last_shard] = PADDING
    return {"inputs": inputs, "targets": targets}


def _cast(leaf: Tensor, case: Case) -> Tensor:
    if not leaf.is_floating_point():
        return leaf
    leaf = leaf if case.dtype is None else leaf.to(case.dtype)
    return _integers(leaf) if case.exact else leaf


def _integers(values: Tensor) -> Tensor:
    largest = values.abs().max() if values.numel() else 1
    return (values / largest * LARGEST_INTEGER).round()


def _must_not_raise(error: Exception) -> str:
    return f"a function that returns; {it_raised(error)}"
