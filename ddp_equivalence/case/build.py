"""Build a case's model, batches and loss. Every process gets the same ones, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.batch_check import check_batch, check_that_it_is_clear
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.precision import cast, cast_model
from ddp_equivalence.case.random_state import batch_seed, generator_seed, seeded
from ddp_equivalence.case.shards import split
from ddp_equivalence.case.steps import Steps
from ddp_equivalence.case.without_dropout import CaseWithoutDropout, turn_off_dropout

LARGEST_INTEGER = 3
"""Weights and inputs of an exact case are integers from -3 to 3, so that sums stay far below 2^24,
the largest number up to which float32 holds every integer."""

_BUILT = "_ddp_equivalence_built"
"""The attribute that marks a model as built before. A builder must return a new model each time."""


def build_model(case: Case) -> nn.Module:
    """Build the untrained model, on the CPU, in the case's dtype.

    Raises BadCase if the builder raises, if what it returns is not a new nn.Module, or if the model
    cannot be compared: it has lazy tensors, complex parameters, or no parameter to train.
    """
    builder = MODELS[case.model].build if isinstance(case.model, str) else case.model
    try:
        with seeded(case.seed):
            model: object = builder()
    except Exception as error:
        right = _must_not_raise("() -> nn.Module", error)
        raise BadCase("model", name_of(case.model), right) from error
    if not isinstance(model, nn.Module):
        right = f"a builder that returns an nn.Module, not {type(model).__name__}"
        raise BadCase("model", name_of(case.model), right)
    if getattr(model, _BUILT, False):
        right = "a builder that makes a new model at each call; this one returned one model twice"
        raise BadCase("model", name_of(case.model), right)
    object.__setattr__(model, _BUILT, True)
    parameters = dict(model.named_parameters())
    _check_tensors(case, parameters | dict(model.named_buffers()))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        right = "a model with at least one parameter that requires a gradient"
        raise BadCase("model", name_of(case.model), right)
    if isinstance(case, CaseWithoutDropout):
        turn_off_dropout(model)
    if case.dtype is not None:
        cast_model(model, case.dtype)
    if case.exact:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(_integers(parameter))
    return model


def _check_tensors(case: Case, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            right = f"a model built on the CPU; {name} is on the meta device, and has no values"
            raise BadCase("model", name_of(case.model), right)
        if is_lazy(tensor):
            right = f"a model whose sizes are known; {name} is lazy: call the model in the builder"
            raise BadCase("model", name_of(case.model), right)
        if tensor.is_complex() and isinstance(tensor, nn.Parameter):
            right = f"real parameters: {name} is {tensor.dtype}; complex gradients are not compared"
            raise BadCase("model", name_of(case.model), right)


def build_batches(case: Case, steps: Steps = 1) -> list[Any]:
    """Build the big batch of every step, on the CPU, with floats in the case's dtype.

    Raises BadCase if it is not clear where the batch holds its examples, or if they cannot be
    divided as ``steps`` says.
    """
    whole, sizes = build_whole_batch(case, steps)
    return batches_of_steps(case, whole, sizes)


def build_whole_batch(case: Case, steps: Steps = 1) -> tuple[Any, tuple[int, ...]]:
    """Build the batch of all steps together, and count the examples of each step."""
    batch = _catalogue_batch(case, steps) if case.batch is None else _batch_of_the_user(case)
    count = check_batch(batch, case.batch_dims, case.examples, case.exact)
    if not count:
        right = "at least one example; all its tensors have length 0"
        raise BadCase("batch", name_of(case.batch), right)
    if not getattr(case.batch, "takes_some_examples", False):
        check_that_it_is_clear(batch, case.batch_dims, count)
    batch = map_tensors(lambda leaf: _prepared(leaf, case), batch)
    return batch, _examples_by_step(count, steps)


def batches_of_steps(case: Case, whole: Any, sizes: Sequence[int]) -> list[Any]:
    """The big batches of the steps, which have ``sizes`` examples each, out of all examples."""
    if len(sizes) == 1:
        return [whole]
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    return [
        take(whole, range(start, start + size), case.batch_dims)
        for start, size in zip(starts, sizes, strict=True)
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
        # Every process uses one thread here, as the ranks do anyway: a matrix product of another
        # number of threads may differ in its last bit.
        with one_thread(), seeded(batch_seed(case.seed)):
            return case.batch(torch.Generator().manual_seed(generator_seed(case.seed)))
    except Exception as error:
        right = _must_not_raise("(torch.Generator) -> pytree of tensors", error)
        raise BadCase("batch", name_of(case.batch), right) from error


def _catalogue_batch(case: Case, steps: Steps) -> Batch:
    assert isinstance(case.model, str)
    assert isinstance(case.loss, str)
    generator = torch.Generator().manual_seed(generator_seed(case.seed))
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


def _prepared(leaf: Tensor, case: Case) -> Tensor:
    """A tensor of the batch on the CPU, in the case's dtype, without a graph or shared memory."""
    prepared = cast(leaf.detach().cpu(), case.dtype)
    if prepared.layout is torch.strided and 0 in prepared.stride():
        prepared = prepared.contiguous()  # so that an expanded tensor can be written to
    if case.exact and prepared.is_floating_point():
        prepared = _integers(prepared)
    return prepared.requires_grad_() if leaf.requires_grad else prepared


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block torch computes with a single thread."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def _integers(values: Tensor) -> Tensor:
    largest = values.abs().max() if values.numel() else 1
    return (values / largest * LARGEST_INTEGER).round()


def _must_not_raise(signature: str, error: Exception) -> str:
    return f"a function {signature}; {it_raised(error)}"
