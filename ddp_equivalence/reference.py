"""The one big batch: one process, one forward pass, one backward pass, plain PyTorch in float64.

A model that cannot compute in float64 computes it in the precision of the case.

This file is the oracle, so it is written to be checked by eye. It uses the builders of the case and
nothing else: it shares no helper with a strategy, and it knows no wrapper, sampler or rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.build import (
    batches_of_steps,
    build_model,
    build_whole_batch,
    cast,
    cast_model,
    copied_state,
    train_by_own_reference,
    without_process_group,
)
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.micro_batches import MicroBatches, Pass
from ddp_equivalence.case.random_state import draws_noticed, step_seed
from ddp_equivalence.case.training import (
    AtSteps,
    Compare,
    GradientKey,
    Settings,
    Stepping,
    Steps,
    Training,
    settings_of,
)

Loss = Callable[[nn.Module, Any], Any]
"""A user's loss: (model, batch) -> scalar tensor."""


@dataclass(frozen=True)
class Reference:
    """The gradients that every rank is compared with.

    ``expected``: the gradient (or the update) of the big batch in float64; None for a parameter
    that backward did not reach. ``dtypes``: the dtype of every parameter that is trained, or that
    the reference moves, as the case builds it. ``examples``: the size of the big batch in each
    step. ``losses``: its loss in each step; empty if the reference is a function of the user's own.
    ``at_each_step``: gradients and updates are those at each step of an optimizer.
    ``after_clipping``: gradients are those after clipping. ``buffers``: what the buffers of the
    model hold afterwards, and the tensors that its modules keep. ``why_not_float64``: what the loss
    raised in float64, if the big batch was therefore computed in the precision of the case.
    ``settings``: with which optimizers step each parameter. ``draws``: False if it has drawn no
    random numbers, but perhaps from a generator of its own. ``micro_batches``: in how many the big
    batch was computed.
    """

    case: Case
    compare: Compare
    training: Training
    steps: Steps
    expected: dict[GradientKey, Tensor | None]
    dtypes: dict[str, torch.dtype]
    examples: tuple[int, ...]
    losses: tuple[float, ...]
    at_each_step: bool = False
    after_clipping: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict)
    why_not_float64: str = ""
    settings: dict[GradientKey, Settings] = field(default_factory=dict)
    draws: bool = True
    micro_batches: MicroBatches = field(default_factory=MicroBatches.whole)

    @property
    def computed_in(self) -> torch.dtype | None:
        """The dtype in which the big batch was computed; None for that of the case."""
        return None if self.why_not_float64 else torch.float64

    @property
    def lowest_dtype(self) -> torch.dtype:
        """The least precise dtype among the trained parameters."""
        return max(self.dtypes.values(), key=lambda dtype: torch.finfo(dtype).eps)


def big_batch(
    case: Case,
    compare: Compare = "gradients",
    training: Training | None = None,
    steps: Steps = 1,
    whole_batch: tuple[Any, tuple[int, ...]] | None = None,
    at_each_step: bool = False,
    after_clipping: bool = False,
    model: nn.Module | None = None,
) -> Reference:
    """Compute the reference of a case. ``whole_batch``, ``model``: its own, if built already.

    Raises BadCase whenever the case's model, batch or loss is at fault.
    """
    training = training or Training()
    model = build_model(case) if model is None else model
    whole, sizes = whole_batch or build_whole_batch(case, steps)
    batches = batches_of_steps(case, whole, sizes)
    every = {name: p.dtype for name, p in model.named_parameters()}
    dtypes = {name: every[name] for name, p in model.named_parameters() if p.requires_grad}
    settings: dict[GradientKey, Settings] = {}
    trained = partial(
        train,
        case,
        compare=compare,
        training=training,
        at_each_step=at_each_step,
        after_clipping=after_clipping,
        settings=settings,
    )
    why_not_float64, micro = "", MicroBatches.of(len(batches), case.batch_dims)
    with draws_noticed() as drew:
        try:
            exact, model = _all_in(torch.float64, batches), cast_model(model, torch.float64)
            expected, losses = trained(model, exact, micro_batches=micro)
        except BadCase as error:
            why = error.__cause__
            if not isinstance(why, Exception) or set(dtypes.values()) <= {torch.float64}:
                raise
            model, why_not_float64, micro = build_model(case), it_raised(why), MicroBatches.whole()
            found, losses = trained(model, _all_in(None, batches))
            expected = {key: None if one is None else one.double() for key, one in found.items()}
    moved = {name for (_, name), one in expected.items() if one is not None}
    return Reference(
        case=case,
        compare=compare,
        training=training,
        steps=steps,
        expected=expected,
        dtypes=dtypes | {name: every[name] for name in moved},
        examples=sizes,
        losses=tuple(losses),
        buffers=copied_state(model),
        why_not_float64=why_not_float64,
        settings=settings,
        draws=training.is_of_the_user or any(drew),
        micro_batches=micro,
        at_each_step=at_each_step,
        after_clipping=after_clipping,
    )


def train(
    case: Case,
    model: nn.Module,
    batches: Sequence[Any],
    compare: Compare,
    training: Training,
    loss: Loss | None = None,
    at_each_step: bool = False,
    after_clipping: bool = False,
    settings: dict[GradientKey, Settings] | None = None,
    micro_batches: MicroBatches | None = None,
) -> tuple[dict[GradientKey, Tensor | None], list[float]]:
    """Run forward and backward once for each big batch, with an optimizer's step between two.

    Returns the gradients of every step (or, with ``compare="update"``, how far all steps together
    moved the weights) and the loss of every step. ``at_each_step``: the weights are compared after
    each step. ``after_clipping``: the gradients are those that the optimizer steps with. If
    ``loss`` is None, the case's own is used. ``settings`` get those with which optimizers step.
    ``micro_batches``: in how many the batch is computed.
    """
    if training.is_of_the_user:
        keep = compare == "gradients"
        at_steps = AtSteps(keep, after_clipping) if at_each_step else None
        seen = {} if settings is None else settings
        return train_by_own_reference(case, model, batches, training, at_steps, seen), []
    before: dict[str, Tensor] = {}
    if compare == "update":
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    steppers = training.steppers(model)
    found: dict[GradientKey, Tensor | None] = {}
    losses: list[float] = []
    micro_batches = micro_batches or MicroBatches.whole()
    for step, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        forward = partial(_forward, case, loss or loss_of_the_case(case), model)
        of_batch = Pass(model, step_seed(case, step), forward, partial(_backward, case))
        with without_process_group():
            losses.append(micro_batches.run(of_batch, batch))
        if compare == "gradients" and not after_clipping:
            found |= {(step, name): _kept(p.grad, training) for name, p in model.named_parameters()}
        if compare == "update" or step + 1 < len(batches) or after_clipping:
            training.clip_gradients(model.parameters())
        if compare == "gradients" and after_clipping:
            found |= {(step, name): _kept(p.grad, training) for name, p in model.named_parameters()}
        if compare == "update" or step + 1 < len(batches):
            for one in steppers:
                if settings is not None and isinstance(one, torch.optim.Optimizer):
                    own = settings_of(one, dict(model.named_parameters()))
                    settings |= {(step, name): of_one for name, of_one in own.items()}
            _take_step(model, training, steppers)
        if compare == "update" and (at_each_step or step + 1 == len(batches)):
            key = step if at_each_step else 0
            found |= {
                (key, name): p.detach() - before[name] if p.requires_grad else None
                for name, p in model.named_parameters()
            }
    return found, losses


def _all_in(dtype: torch.dtype | None, batches: Sequence[Any]) -> list[Any]:
    return [in_dtype(batch, dtype) for batch in batches]


def in_dtype(batch: Any, dtype: torch.dtype | None) -> Any:
    """A copy of the batch, with its floats (and complex numbers) in ``dtype`` unless it is None."""

    def copied(leaf: Tensor) -> Tensor:
        copy = cast(leaf.detach(), dtype)
        copy = copy.clone() if copy.dtype == leaf.dtype else copy
        return copy.requires_grad_() if leaf.requires_grad else copy

    return map_tensors(copied, batch)


def loss_of_the_case(case: Case) -> Loss:
    """The case's loss function, from the catalogue if the case has only its name."""
    return LOSSES[case.loss] if isinstance(case.loss, str) else case.loss


SCALAR = "a function that returns a scalar tensor"


def _forward(case: Case, loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The value of the loss. Raises BadCase unless it is a scalar tensor with a graph."""
    name = name_of(case.loss)
    try:
        value = loss(model, batch)
    except Exception as error:
        right = f"a function (model, batch) -> scalar tensor; {it_raised(error)}"
        if case.dtype is torch.float64 and ("dtype" in str(error) or "Double" in str(error)):
            right += (
                " (the case is checked in float64: give constants the dtype of the input; or, if "
                "the model cannot compute in it, choose another, as Case(dtype=torch.float32))"
            )
        raise BadCase("loss", name, right) from error
    if not isinstance(value, Tensor):
        raise BadCase("loss", name, f"{SCALAR}, not {type(value).__name__}")
    if value.ndim != 0:
        raise BadCase("loss", name, f"{SCALAR}, not one of shape {tuple(value.shape)}")
    if torch.is_grad_enabled() and not value.requires_grad:
        right = f"{SCALAR} with a graph; this one requires no gradient (detach or no_grad?)"
        raise BadCase("loss", name, right)
    return value


def _backward(case: Case, value: Tensor) -> None:
    try:
        value.backward()
    except Exception as error:
        right = f"a loss that can go backward; {it_raised(error)}"
        raise BadCase("loss", name_of(case.loss), right) from error


def _kept(gradient: Tensor | None, training: Training) -> Tensor | None:
    """The gradient, or a copy of it if something may change it before the end."""
    return gradient if gradient is None or training.is_plain_sgd else gradient.clone()


def _take_step(model: nn.Module, training: Training, steppers: Sequence[Stepping]) -> None:
    """Let the user's optimizer step; or plain SGD, which hides no wrong factor on the gradient."""
    for one in steppers:
        one.step()
    if steppers:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to_dense(), alpha=training.lr)
