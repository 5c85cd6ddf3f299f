"""Builds a case's model, batches and loss, which are the same in every process, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from ddp_equivalence.case.batch import BatchDims, check_batch, check_that_it_is_clear, take
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.case import BatchBuilder, Case, name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.case.memory import give_back_memory
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import batch_seed, generator_seed, seeded, step_seed
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.training import (
    REFERENCE,
    AtSteps,
    GradientKey,
    Settings,
    StepRecord,
    Steps,
    Training,
    begin_reference,
    update_of,
)

# Build a case's model, batches and loss. Every process gets the same ones, bit for bit.

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
        right = f"a function () -> nn.Module; {it_raised(error)}"
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
    give_back_memory(sum(parameter.numel() for parameter in parameters.values()))
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
            right = f"one with real parameters: {name} is {tensor.dtype}, and such are not compared"
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
        right = "a function that makes at least one example; all its tensors have length 0"
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
        right = f"a function (torch.Generator) -> pytree of tensors; {it_raised(error)}"
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
            right = f"such as 'equal', or used with a loss over tokens instead of {loss.name}"
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


# The precision of a case: which tensors of its batch and model are cast, and to which dtype.

COMPLEX: Mapping[torch.dtype | None, torch.dtype] = {
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
"""The complex dtype of each precision. In the others, complex tensors keep their own."""


def cast(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point or complex tensor in this precision; others, and all with None, stay."""
    if dtype is not None and leaf.is_floating_point():
        return leaf.to(dtype)
    if dtype in COMPLEX and leaf.is_complex():
        return leaf.to(COMPLEX[dtype])
    return leaf


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a real model, in place; complex buffers, such as rotary embeddings, stay complex.

    ``model.to(dtype)`` would discard their imaginary parts.
    """
    complex_buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    for module, name, _ in complex_buffers:
        setattr(module, name, None)
    model.to(dtype)
    for module, name, buffer in complex_buffers:
        setattr(module, name, cast(buffer, dtype))
    return model


# The same case with dropout turned off, in the reference and on all ranks.


class CaseWithoutDropout(Case):
    """A case whose model drops nothing, also where the step puts it into training mode."""


def without_dropout(case: Case) -> CaseWithoutDropout:
    """The case with dropout turned off."""
    return CaseWithoutDropout(**{field.name: getattr(case, field.name) for field in fields(case)})


def trains_with_dropout(model: nn.Module) -> bool:
    """True if torch's own modules drop something when the model is called as it is now."""
    return any(
        module.training and getattr(module, name) > 0 for module, name in _probabilities(model)
    )


def turn_off_dropout(model: nn.Module) -> None:
    """Let torch's own modules drop nothing."""
    for module, name in _probabilities(model):
        setattr(module, name, 0.0)


def _probabilities(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules of the model that drop something, and the attribute with the probability."""
    found: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            found.append((module, "p"))
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            found.append((module, "dropout"))
    return found


# The state of a model that is no parameter: buffers, and tensors that its modules keep.


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every buffer of the model, and every tensor without a gradient that a module keeps as a plain
    attribute, by its name.
    """
    for path, module in model.named_modules():
        kept = [(name, one) for name, one in vars(module).items() if type(one) is Tensor]
        for name, one in (*module._buffers.items(), *kept):
            if one is not None and not one.requires_grad:
                yield f"{path}.{name}" if path else name, one


def put_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the model this state, in the dtypes that it has; what it does not have is left out."""
    now = dict(named_state(model))
    for name, value in state.items():
        if name in now:
            path, _, attribute = name.rpartition(".")
            like = now[name]
            setattr(model.get_submodule(path), attribute, value.to(like.device, like.dtype).clone())


def copied_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's state."""
    with torch.no_grad():
        return {name: one.detach().clone() for name, one in named_state(model)}


# Lets code run as in a process that has no process group, whatever this process is a member of.


@contextmanager
def without_process_group() -> Iterator[None]:
    """Inside the block, ``torch.distributed.is_initialized()`` is False.

    A loss may all-reduce where there is a group. The big batch is computed in one process, which
    can be a member of a group: that of rank 0 in process, or one of the caller's own. Where the
    code runs a collective without asking whether there is a group, it gets a group of this process
    alone, so that a sum over ranks is the process's own value. The block ends that group.
    """
    member: Any = dist.GroupMember if dist.is_available() else None
    if member is None:
        yield
        return
    world = member.WORLD
    member.WORLD = None
    try:
        with nullcontext() if _forbidden else _group_of_one_where_asked_for(member):
            yield
    finally:
        member.WORLD = world


@contextmanager
def no_group_of_one() -> Iterator[None]:
    """Inside the block, a collective of the big batch's loss raises torch's own error."""
    _forbidden.append(True)
    try:
        yield
    finally:
        _forbidden.pop()


_forbidden: list[bool] = []


@contextmanager
def _group_of_one_where_asked_for(member: Any) -> Iterator[None]:
    """Every collective of torch.distributed asks one private function for the default group."""
    c10d: Any = dist.distributed_c10d
    asked, groups, count = c10d._get_default_group, set(c10d._world.pg_map), c10d._world.group_count

    def default_group() -> Any:
        if not dist.is_initialized():
            c10d._get_default_group = asked
            store: Any = dist.HashStore()  # type: ignore[attr-defined]  # no stubs
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return asked()

    c10d._get_default_group = default_group
    try:
        yield
    finally:
        c10d._get_default_group = asked
        member.WORLD = None  # so that torch ends these groups, and no others
        for group in set(c10d._world.pg_map) - groups:
            dist.destroy_process_group(group)
        # Other ranks count the groups of this process's own group too, and name the next by it.
        c10d._world.group_count = count


# Trains with a reference of the user's own, in one process, and records what it does.


def train_by_own_reference(
    case: Case,
    model: nn.Module,
    batches: Sequence[Any],
    training: Training,
    at_steps: AtSteps | None,
    settings: dict[GradientKey, Settings],
) -> dict[GradientKey, Tensor | None]:
    """Call the user's reference once for each big batch. ``settings`` get those of its optimizers.

    Returns how far the weights have moved at the end; or what ``at_steps`` asks for at each step of
    an optimizer: how far they have moved until then, or the gradients. Raises BadCase if the
    reference raises.
    """
    assert training.reference is not None
    name = name_of(training.reference)
    before = {one: p.detach().clone() for one, p in model.named_parameters()}
    record = StepRecord(lambda: dict(model.named_parameters()), at_steps or AtSteps())
    try:
        step = begin_reference(training.reference, model)
        with record.watched() if at_steps else nullcontext():
            for number, batch in enumerate(batches):
                with seeded(step_seed(case, number)), without_process_group():
                    step(batch)
    except BadCase:
        raise
    except Exception as error:
        right = f"{REFERENCE}; {it_raised(error)}"
        raise BadCase("reference", name, right) from error
    settings |= record.settings
    if at_steps is not None and at_steps.gradients:
        return dict(record.gradients)
    moved = {(0, one): p.detach() for one, p in model.named_parameters()}
    return {
        (step, one): update_of(weight, before[one], not model.get_parameter(one).requires_grad)
        for (step, one), weight in (moved if at_steps is None else record.weights).items()
    }


# Deals the batch: the examples that a rank is given.


def given_to(
    rank: int, case: Case, whole: Any, sizes: Sequence[int], *, undivided: bool, together: bool
) -> list[Any]:
    """The examples that a rank is given, on the CPU: of every step, or of all steps together.

    ``whole``: the batch of all steps, which have ``sizes`` examples each. ``undivided``: the rank
    gets the whole batch, as it does with ``shards="own"``. ``together``: it gets the examples of
    all steps at once.
    """
    if undivided or case.shards == OWN:
        return [whole] if together else batches_of_steps(case, whole, sizes)
    own = [split(case.shards, size, case.ranks.world_size).indices[rank] for size in sizes]
    if together:
        starts = [sum(sizes[:step]) for step in range(len(sizes))]
        of_all_steps = [
            start + index for start, indices in zip(starts, own, strict=True) for index in indices
        ]
        return [take(whole, of_all_steps, case.batch_dims)]
    return [
        take(batch, indices, case.batch_dims)
        for batch, indices in zip(batches_of_steps(case, whole, sizes), own, strict=True)
    ]


# Make a case that has only some examples of another case's big batch.

ExampleSubset = int | tuple[int, ...]
"""Examples of a big batch: a number n for the first n of them, or a tuple of their positions."""

ACCEPTED = "a number of examples from 1, or their positions as in 0,1,5"


@dataclass(frozen=True)
class SubsetBuilder:
    """A batch builder that calls another one and keeps only the examples at ``positions``.

    It can be pickled if the other builder can, so that every rank builds the same subset.
    """

    builder: BatchBuilder
    positions: tuple[int, ...]
    dims: BatchDims = field(default=None, hash=False)

    takes_some_examples = True
    """Whether it is clear where the examples lie was asked of the whole batch. Of some examples,
    any number may be as many as the entries of a list that every rank has whole."""

    def __call__(self, generator: torch.Generator) -> Any:
        return take(self.builder(generator), self.positions, self.dims)

    @property
    def __name__(self) -> str:
        return name_of(self.builder)


def with_examples(case: Case, subset: ExampleSubset) -> Case:
    """The case with only these examples in its big batch.

    Raises BadCase for a number or position beyond the batch, for a position given twice, and for
    positions in a batch of the catalogue, which is made in any size that is asked for.
    """
    positions = tuple(range(subset)) if isinstance(subset, int) else subset
    if not positions or min(positions) < 0 or len(set(positions)) < len(positions):
        raise BadCase("examples", subset, ACCEPTED)
    if case.batch is None:
        if not isinstance(subset, int):
            raise BadCase("examples", subset, "a number, since the catalogue makes its own batch")
        return replace(case, examples=subset)
    size = examples_in(case)
    if max(positions) >= size:
        raise BadCase("examples", subset, f"at most the {size} examples of the batch")
    builder = SubsetBuilder(case.batch, positions, case.batch_dims)
    dealt = callable(case.batch_dims)
    return replace(case, batch=builder, examples=len(positions) if dealt else None)


def examples_in(case: Case) -> int:
    """The number of examples in the case's batch. Raises BadCase if the batch cannot be built."""
    return build_whole_batch(case)[1][0]


def parse(text: str) -> ExampleSubset:
    """Read ``"12"`` as the first twelve examples, and ``"0,1,5"`` or ``"7,"`` as positions.

    Raises BadCase for any other text.
    """
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadCase("examples", text, ACCEPTED)
    return tuple(map(int, parts)) if "," in text else int(text)


def untie(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Let each place but the first one of a parameter have a copy of it. Returns these places, and
    what was there.
    """
    known: set[int] = set()
    places = []
    for module in model.modules():
        for key, one in module._parameters.items():
            if one is not None and id(one) in known:
                module._parameters[key] = nn.Parameter(one.detach().clone(), one.requires_grad)
                places.append((module, key, one))
            known.add(id(one))
    return places
