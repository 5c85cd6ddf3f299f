"""How the big batch is trained where several steps, or updates of the weights, are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.case.numbers import is_number


class Stepping(Protocol):
    """An optimizer or a scheduler of learning rates: all that is asked of it is its next step."""

    def step(self) -> Any: ...


MakeOptimizer = Callable[[Any], Stepping | Sequence[Stepping]]
"""A user's function of the model's parameters, or of the model if its argument is called so. It
returns what steps after every backward pass: an optimizer, or several optimizers and schedulers in
the order in which they step."""

Clip = float | Callable[[list[nn.Parameter]], object]
"""The largest norm of all gradients together, or a user's function of the parameters."""

OwnReference = Callable[..., Any]
"""A user's function (model, batch) -> None, which trains one step in one process; or a function
(model) -> such a function of the batch, which keeps an optimizer through all steps."""

OPTIMIZER = (
    "a function of the parameters (or of the model, if its argument is called model) that returns "
    "an optimizer, or a list of optimizers and schedulers"
)
REFERENCE = (
    "a function (model, batch) that trains one step in one process, or a function (model) that "
    "returns such a function of the batch"
)


@dataclass(frozen=True)
class Training:
    """What the reference does after each backward pass; plain SGD if nothing else is given.

    ``lr``: the learning rate of plain SGD. ``optimizer``: what steps instead. ``clip``: what
    happens to the gradients before. ``reference``: does whole steps by itself, with a loss and an
    optimizer of its own.
    """

    lr: float = 0.1
    optimizer: MakeOptimizer | None = None
    clip: Clip | None = None
    reference: OwnReference | None = None

    @property
    def is_plain_sgd(self) -> bool:
        """True if a step moves each weight by ``-lr`` times its gradient."""
        return self.optimizer is None and self.clip is None and self.reference is None

    @property
    def is_of_the_user(self) -> bool:
        """True if the reference is a user's own function, which nothing can be predicted from."""
        return self.reference is not None

    def steppers(self, model: nn.Module) -> list[Stepping]:
        """What steps after every backward pass, for this model; nothing with plain SGD.

        Raises BadCase if the user's function raises or returns something else.
        """
        if self.optimizer is None:
            return []
        argument: object = model if _takes_model(self.optimizer) else list(model.parameters())
        try:
            made = self.optimizer(argument)
        except Exception as error:
            right = f"{OPTIMIZER}; {it_raised(error)}"
            raise BadCase("optimizer", name_of(self.optimizer), right) from error
        steppers = list(made) if isinstance(made, Sequence) else [made]
        wrong = [one for one in steppers if not callable(getattr(one, "step", None))]
        if wrong or not any(isinstance(one, torch.optim.Optimizer) for one in steppers):
            given = type(wrong[0] if wrong else made).__name__
            raise BadCase("optimizer", name_of(self.optimizer), f"{OPTIMIZER}; not {given}")
        return steppers

    def clip_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients as the user asks for.

        Raises BadCase if the user's function raises.
        """
        if self.clip is None:
            return
        with_gradient = [one for one in parameters if one.grad is not None]
        if not callable(self.clip):
            torch.nn.utils.clip_grad_norm_(with_gradient, self.clip)
            return
        try:
            self.clip(with_gradient)
        except Exception as error:
            right = f"a number above 0, or a function of the parameters; {it_raised(error)}"
            raise BadCase("clip", name_of(self.clip), right) from error


def begin_reference(reference: OwnReference, model: nn.Module) -> Callable[[Any], Any]:
    """The user's step in one process, as a function of the batch."""
    if positional_arguments(reference) == 1:
        step: Any = reference(model)
        if not callable(step):
            right = f"{REFERENCE}; it returned {type(step).__name__}"
            raise BadCase("reference", name_of(reference), right)
        return lambda batch: step(batch)
    return lambda batch: reference(model, batch)


def check_training(training: Training, compare: str) -> None:
    """Raises BadCase for an optimizer, a clip or a reference that cannot be right."""
    for name in ("optimizer", "reference"):
        value = getattr(training, name)
        right = OPTIMIZER if name == "optimizer" else REFERENCE
        if value is not None and not callable(value):
            raise BadCase(name, value, right)
    if isinstance(training.optimizer, type) and issubclass(
        training.optimizer, torch.optim.Optimizer
    ):
        made = training.optimizer.__name__
        right = f"a function that makes it with its settings: lambda params: {made}(params, lr=...)"
        raise BadCase("optimizer", made, right)
    clip = training.clip
    if clip is not None and not callable(clip) and not (is_number(clip) and clip > 0):
        raise BadCase("clip", clip, "a number above 0, or a function of the parameters")
    if training.reference is not None and positional_arguments(training.reference) not in (1, 2):
        raise BadCase("reference", name_of(training.reference), REFERENCE)
    if training.reference is not None and (training.optimizer or training.clip is not None):
        given = "optimizer" if training.optimizer else "clip"
        right = "nothing beside reference=, which steps with an optimizer of its own"
        raise BadCase(given, name_of(getattr(training, given)), right)
    if compare != "update" and not training.is_plain_sgd:
        names = [name for name in ("optimizer", "clip", "reference") if getattr(training, name)]
        right = f'"update": with {names[0]}= the step trains, and leaves weights to compare'
        raise BadCase("compare", compare, right)


def positional_arguments(function: Callable[..., Any]) -> int | None:
    """How many arguments a function needs; None if that is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        one.kind in positional and one.default is inspect.Parameter.empty for one in parameters
    )


def _takes_model(make: MakeOptimizer) -> bool:
    try:
        names = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["model"]
